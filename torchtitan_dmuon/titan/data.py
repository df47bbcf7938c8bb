"""Real text for a first run without any download: the `.py` sources of the running Python's standard library.

Decides what the documents are, their order, which are held out, and the 2,048-token BPE tokenizer trained on them; all
is made once and kept in one folder that serves as `hf_assets_path` and as `dataset_path` of both data sets. Does not
decide how documents become batches: that is TorchTitan's own text data loader, which learns the data sets' names from
`prepare_for`, called by the entry points and never by an import. Keeps: a folder appears whole or not at all and is
never written again, so any number of runs and ranks may prepare and read it at once; one that holds anything else is
refused, and nothing in it is touched.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import sys
import sysconfig
import time
import tokenize
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtitan_dmuon.outputs import refuse_foreign

DATASET = "python_stdlib"
HELD_OUT = "python_stdlib_validation"  # the last sixteenth of the documents, which DATASET leaves out
DEFAULT_FOLDER = "./outputs/python_stdlib"
MAKER = "`dmuon prepare-data`"
VOCAB_SIZE = 2048
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"

_DOCUMENT_CHARS = 1500  # about four sequences of 128 tokens: a short run still sees many modules
_MAX_BYTES = 20_000_000
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_MARKER = "prepared.json"
_MARKER_KEYS = {"python", "documents", "characters", "vocab_size", "requested_vocab_size"}


def source_files(root: Path) -> list[Path]:
    """The `.py` files below `root` in path order: no tests, no installed packages, at most 20 MB together."""
    found, total = [], 0
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS]
        found += [p for f in files if f.endswith(".py") and (p := Path(folder, f)).is_file()]  # no dangling links
    kept = []
    for path in sorted(found, key=lambda p: p.relative_to(root).as_posix()):
        total += path.stat().st_size
        if total > _MAX_BYTES:
            break
        kept.append(path)
    return kept


def documents(root: Path) -> list[dict[str, str]]:
    """`[{"text", "source"}]`: runs of whole lines of about 1,500 characters.

    The order is that of a digest of (path, run number): the same on every machine with the same sources, and neighbours
    come from different modules, so the contiguous shard that each data-parallel rank reads is a fair sample.
    """
    keyed = []
    for path in source_files(root):
        try:
            with tokenize.open(path) as f:  # honours the file's declared encoding
                text = f.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        name = path.relative_to(root).as_posix()
        for i, run in enumerate(_line_runs(text)):
            keyed.append((hashlib.sha256(f"{name}:{i}".encode()).digest(), {"text": run, "source": f"{name}:{i}"}))
    return [document for _, document in sorted(keyed, key=lambda pair: pair[0])]


def _line_runs(text: str) -> Iterator[str]:
    run: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        run.append(line)
        size += len(line)
        if size >= _DOCUMENT_CHARS:
            yield "".join(run)
            run, size = [], 0
    if run:
        yield "".join(run)


def _train_tokenizer(texts: Sequence[str], vocab_size: int, folder: Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte has a token: no text is unknown
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer=trainer, length=len(texts))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return tokenizer.get_vocab_size()


def prepare(out: str | os.PathLike[str], *, root: Path | None = None, vocab_size: int = VOCAB_SIZE) -> dict[str, Any]:
    """Make the documents and the tokenizer in `out`, or return what an earlier call made there.

    The folder then holds `tokenizer.json` and `tokenizer_config.json` (TorchTitan's `hf_assets_path`), `documents/` (a
    saved `datasets.Dataset`) and `prepared.json`, which is what this returns: {"python", "documents", "characters",
    "vocab_size", "requested_vocab_size"}. Callers that arrive while another one works wait for it. Raises ValueError
    when `root` (default: the standard library) has no sources, or `out` is not a new or empty folder and was not
    prepared, or was for another vocabulary size.
    """
    folder = Path(out)
    if _made(folder) is None:
        refuse_foreign(folder, MAKER)
        place = folder.resolve()  # of a link to an empty folder, that folder
        if place == Path.cwd():
            raise ValueError(f"{folder} is the current folder: name a new one in it")
        place.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(place.parent):
            if _made(folder) is None:  # another process may have finished while this one waited
                _make(place, root or Path(sysconfig.get_paths()["stdlib"]), vocab_size)
    made = _made(folder)
    assert made is not None
    if made["requested_vocab_size"] != vocab_size:
        raise ValueError(
            f"{folder} was prepared with a vocabulary of {made['requested_vocab_size']} tokens, but {vocab_size} are "
            "asked for: choose another folder"
        )
    return made


def _made(folder: Path) -> dict[str, Any] | None:
    """What `prepare` left in the folder; None where it did not, or something else wrote there."""
    try:
        made = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return made if isinstance(made, dict) and made.keys() >= _MARKER_KEYS else None


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait for other processes in this block, to spare their work: where a file system locks no folders, each works and
    the first one's result stays."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make(place: Path, root: Path, vocab_size: int) -> None:
    """Make all in a new folder beside and give it the name: the system refuses that where the name holds anything."""
    from datasets import Dataset

    found = documents(root)
    if not found:
        raise ValueError(f"no Python sources below {root}: data preparation needs an unpacked standard library")
    texts = [document["text"] for document in found]
    unfinished = place.parent / f".{place.name}.{uuid.uuid4().hex}"
    unfinished.mkdir()
    try:
        tokens = _train_tokenizer(texts, vocab_size, unfinished)
        Dataset.from_list(found).save_to_disk(str(unfinished / "documents"))
        made = {
            "python": platform.python_version(),
            "documents": len(found),
            "characters": sum(map(len, texts)),
            "vocab_size": tokens,
            "requested_vocab_size": vocab_size,
        }
        (unfinished / _MARKER).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
        try:
            os.rename(unfinished, place)
        except OSError:
            if _made(place) is None:  # else another machine was faster
                refuse_foreign(place, MAKER)
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # made above; gone once it has its name


def load_documents(path: str) -> Any:
    """The prepared documents as a map-style `datasets.Dataset`. Raises ValueError when `path` is not prepared."""
    if _made(Path(path)) is None:
        raise ValueError(
            f"{path} holds no prepared documents (no {_MARKER}): run `dmuon prepare-data --out {path}` first"
        )
    from datasets import load_from_disk

    return load_from_disk(str(Path(path, "documents")))


def training_documents(path: str) -> Any:
    documents = load_documents(path)
    return documents.select(range(_training_count(documents)))


def held_out_documents(path: str) -> Any:
    documents = load_documents(path)
    return documents.select(range(_training_count(documents), len(documents)))


def _training_count(documents: Any) -> int:
    return len(documents) - len(documents) // 16


def _text(sample: dict[str, Any]) -> str:
    return sample["text"]


def register_datasets() -> None:
    """Add both names to TorchTitan's table of text data sets (0.3.0: a plain module-level dict)."""
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    for name, loader in ((DATASET, training_documents), (HELD_OUT, held_out_documents)):
        DATASETS[name] = DatasetConfig(path=DEFAULT_FOLDER, loader=loader, sample_processor=_text)


def prepare_for(config: Any) -> None:
    """Prepare and register the data of a TorchTitan trainer config that trains or validates on ours; do nothing for any
    other data set. Makes the default folder alone: any other path must be prepared, so that a mistyped one makes none.

    Safe on all ranks at once: one works, the others wait. Call it before the trainer builds its tokenizer.
    """
    from torchtitan_dmuon.titan.config import ConfigError

    loaders = {"dataloader": config.dataloader}
    if config.validator.enable:
        loaders["validator.dataloader"] = config.validator.dataloader
    for key, loader in loaders.items():
        if getattr(loader, "dataset", "").lower() in (DATASET, HELD_OUT):  # a mix of several sources has no `dataset`
            path = loader.dataset_path or DEFAULT_FOLDER
            try:
                prepare(path) if Path(path) == Path(DEFAULT_FOLDER) else load_documents(path)
            except (OSError, ValueError) as error:
                raise ConfigError(str(error), f"{key}.dataset_path") from None
            register_datasets()


def main(argv: Sequence[str] | None = None, prog: str = "python -m torchtitan_dmuon.titan.data") -> int:
    parser = argparse.ArgumentParser(prog=prog, description="Make the quickstart's text and tokenizer, once.")
    parser.add_argument("--out", default=DEFAULT_FOLDER, help="folder to make (default: %(default)s)")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    try:
        made = prepare(args.out)
    except (OSError, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    print(
        f"{args.out}: {made['documents']:,} documents, {made['characters'] / 1e6:.1f} M characters of Python "
        f"{made['python']}'s standard library, a tokenizer of {made['vocab_size']:,} tokens "
        f"({time.perf_counter() - start:.1f} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
