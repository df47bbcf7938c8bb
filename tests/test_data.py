"""The quickstart's text: same documents in the same order everywhere, made once, readable by TorchTitan's loader."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.ranks import run_ranks
from torchtitan_dmuon.titan import data


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """Sixty small modules, and folders that must not be read."""
    root = tmp_path_factory.mktemp("lib")
    for i in range(60):
        body = "".join(f"def function_{i}_{j}(argument):\n    return argument + {j}\n\n" for j in range(40 + i))
        (root / f"pkg{i % 3}").mkdir(exist_ok=True)
        (root / f"pkg{i % 3}" / f"module_{i:02d}.py").write_text(body)
    for skipped in ("test", "site-packages", "pkg0/tests"):
        (root / skipped).mkdir()
        (root / skipped / "hidden.py").write_text("HIDDEN = 1\n")
    (root / "notes.txt").write_text("HIDDEN")
    (root / "bad.py").write_bytes(b"# -*- coding: ascii -*-\nx = '\xff'\n")
    (root / "dangling.py").symlink_to(root / "nowhere.py")
    return root


@pytest.fixture(scope="module")
def prepared(sources, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("data") / "prepared"
    data.prepare(out, root=sources, vocab_size=400)
    return out


def test_documents_cover_the_sources_once_and_skip_tests_and_packages(sources):
    found = data.documents(sources)
    assert not any("HIDDEN" in d["text"] for d in found)
    assert len({d["source"] for d in found}) == len(found)
    by_file: dict[str, list[tuple[int, str]]] = {}
    for d in found:
        name, run = d["source"].rsplit(":", 1)
        by_file.setdefault(name, []).append((int(run), d["text"]))
    assert len(by_file) == 60  # bad.py does not decode as it declares
    for name, runs in by_file.items():
        assert "".join(text for _, text in sorted(runs)) == (sources / name).read_text()


def test_order_is_fixed_and_mixes_modules(sources, monkeypatch):
    found = [d["source"] for d in data.documents(sources)]
    real = os.walk

    def backwards(root):  # a file system that lists everything in another order
        for folder, folders, files in real(root):
            folders.sort(reverse=True)
            yield folder, folders, sorted(files, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    assert [d["source"] for d in data.documents(sources)] == found
    assert found != sorted(found)


def test_a_size_limit_holds(sources, monkeypatch):
    monkeypatch.setattr(data, "_MAX_BYTES", 20_000)
    kept = data.source_files(sources)
    assert 0 < sum(p.stat().st_size for p in kept) <= 20_000


def test_prepare_twice_gives_the_same_bytes(sources, prepared, tmp_path):
    data.prepare(tmp_path / "again", root=sources, vocab_size=400)
    for name in ("tokenizer.json", "tokenizer_config.json", "prepared.json"):
        assert (tmp_path / "again" / name).read_bytes() == (prepared / name).read_bytes()
    assert data.load_documents(str(tmp_path / "again"))["text"] == data.load_documents(str(prepared))["text"]


def test_a_prepared_folder_is_not_written_again(sources, prepared):
    before = {p: p.stat().st_mtime_ns for p in prepared.rglob("*")}
    made = data.prepare(prepared, root=sources, vocab_size=400)
    assert made["documents"] == len(data.documents(sources)) and made["vocab_size"] == 400
    assert {p: p.stat().st_mtime_ns for p in prepared.rglob("*")} == before
    with pytest.raises(ValueError, match="400 tokens, but 300"):
        data.prepare(prepared, root=sources, vocab_size=300)


def tree(folder: Path) -> dict[str, str]:
    """What is below a folder: a digest of every file, the kind of all else."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        if p.is_file()
        else oct(p.lstat().st_mode)
        for p in sorted(folder.rglob("*"))
    }


def refused(path: str, said: str) -> None:
    """What a training says whose `dataset_path` is `path`."""
    pytest.importorskip("torchtitan")
    from torchtitan_dmuon.titan import platform

    platform.prepare()  # before any other torchtitan module
    from torchtitan_dmuon.titan.config import ConfigError

    loader = SimpleNamespace(dataset="python_stdlib", dataset_path=path)
    with pytest.raises(ConfigError, match=said) as raised:
        data.prepare_for(SimpleNamespace(dataloader=loader, validator=SimpleNamespace(enable=False)))
    assert raised.value.path == "dataloader.dataset_path"


# What a user's folder may hold: each name that a preparation makes, alone and beside a note, whole and half.
HELD = [
    {"notes.txt": "mine"},
    {"documents/my_notes.txt": "mine"},
    {"documents/dataset_info.json": "half of it", "tokenizer.json": "{"},
    {"tokenizer.json": "mine"},
    {"tokenizer_config.json": "mine"},
    {"prepared.json": "{}"},
    {"prepared.json": "{", "documents/data-00000-of-00001.arrow": "x"},
    {"prepared.json": "[]"},
    {".lock": "mine"},
    {".hidden": "mine"},
    {"documents/": ""},
]


@pytest.mark.parametrize("held", HELD, ids=lambda held: "+".join(held))
@pytest.mark.parametrize("how", ["function", "command", "link", "training"])
def test_a_folder_that_holds_other_files_is_refused_and_kept(held, how, sources, tmp_path, capsys):
    folder = tmp_path / "folder"
    for name, text in held.items():
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(text)
    before = tree(tmp_path)
    link = tmp_path / "link"
    if how == "link":
        link.symlink_to(folder)
        before = tree(tmp_path)
    said = f"{'link' if how == 'link' else 'folder'} holds other files.*{min(held).split('/')[0]}"
    if how in ("function", "link"):
        with pytest.raises(ValueError, match=said):
            data.prepare(link if how == "link" else folder, root=sources, vocab_size=300)
    elif how == "command":
        assert data.main(["--out", str(folder)]) == 2
        error = capsys.readouterr().err
        assert re.search(said, error) and len(error.strip().splitlines()) == 1
    else:
        refused(str(folder), "no prepared documents.*prepare-data")
    assert tree(tmp_path) == before
    with pytest.raises(ValueError, match="prepare-data"):
        data.load_documents(str(folder))


def test_a_file_and_the_current_folder_are_refused(sources, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for out in (tmp_path / "file", tmp_path / "file" / "below", ".", tmp_path / "empty"):
        with pytest.raises((ValueError, OSError), match="is a file|Not a directory|File exists|current folder"):
            data.prepare(out, root=sources, vocab_size=300)
    assert set(tree(tmp_path)) == {"file", "empty"} and (tmp_path / "file").read_text() == "mine"


def test_training_prepares_its_default_folder_and_no_other(sources, tmp_path, monkeypatch):
    """A mistyped path makes no new data set."""
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path / "new"), "outputs/python_stdlip"):
        refused(path, f"prepare-data --out {path}")
    assert tree(tmp_path) == {}
    Path(data.DEFAULT_FOLDER).mkdir(parents=True)
    (Path(data.DEFAULT_FOLDER) / "notes.txt").write_text("mine")
    refused(data.DEFAULT_FOLDER, "holds other files .notes.txt")


def test_an_interrupted_preparation_leaves_no_folder_and_is_made_anew(sources, tmp_path, monkeypatch):
    import datasets

    def interrupted(self, path):
        Path(path).mkdir()
        raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(datasets.Dataset, "save_to_disk", interrupted)
        with pytest.raises(KeyboardInterrupt):
            data.prepare(tmp_path / "out", root=sources, vocab_size=300)
    assert tree(tmp_path).keys() == {"out"}
    data.prepare(tmp_path / "out", root=sources, vocab_size=300)  # an empty folder is taken
    assert len(data.load_documents(str(tmp_path / "out"))) == len(data.documents(sources))
    assert os.listdir(tmp_path) == ["out"]


def test_files_that_appear_while_it_works_are_kept(sources, tmp_path, monkeypatch):
    import datasets

    save = datasets.Dataset.save_to_disk

    def meanwhile(self, path):
        save(self, path)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes.txt").write_text("mine")

    monkeypatch.setattr(datasets.Dataset, "save_to_disk", meanwhile)
    with pytest.raises(ValueError, match="holds other files .notes.txt"):
        data.prepare(tmp_path / "out", root=sources, vocab_size=300)
    assert tree(tmp_path).keys() == {"out", "out/notes.txt"}


def test_three_processes_at_once_make_one_folder(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
    import datasets  # noqa: F401  (once, not in every process)
    import tokenizers  # noqa: F401

    def job(rank, world):
        made, make = [], data._make
        data._make = lambda *arguments: made.append(make(*arguments))
        data.prepare(tmp_path / "out", root=sources, vocab_size=300)
        return len(made), len(data.load_documents(str(tmp_path / "out")))

    counts, documents = zip(*run_ranks(job, 3, init=False))
    assert sorted(counts) == [0, 0, 1]
    assert set(documents) == {len(data.documents(sources))}


def test_no_sources_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no Python sources"):
        data.prepare(tmp_path / "out", root=tmp_path)
    assert not (tmp_path / "out" / "prepared.json").exists()


def test_command_reports_and_fails_in_one_line(tmp_path, capsys, monkeypatch, sources):
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(sources)})
    assert data.main(["--out", str(tmp_path / "out")]) == 0
    assert "documents" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert data.main(["--out", str(tmp_path / "file")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_torchtitan_reads_it(prepared):
    """TorchTitan's tokenizer and text data set: begin and end tokens, shards without overlap, labels shifted by one."""
    pytest.importorskip("torchtitan")
    from torchtitan_dmuon.titan import platform

    platform.prepare()  # before any other torchtitan module, for the tests that come after in this process
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets import text_datasets

    text_datasets.DATASETS.pop(data.DATASET, None)
    importlib.reload(data)
    assert data.DATASET not in text_datasets.DATASETS  # importing our module registers nothing
    data.register_datasets()
    try:
        tokenizer = HuggingFaceTokenizer(tokenizer_path=str(prepared))
        ids = tokenizer.encode("def f(x):\n    return x é\n", add_bos=True, add_eos=True)
        assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
        assert tokenizer.decode(ids[1:-1]) == "def f(x):\n    return x é\n"
        assert tokenizer.get_vocab_size() == 400

        firsts = []
        for rank in range(2):
            dataset = text_datasets.HuggingFaceTextDataset(data.DATASET, str(prepared), tokenizer, 64, rank, 2)
            batch, labels = next(iter(dataset))
            assert batch["input"].shape == labels.shape == (64,) and max(batch["input"]) < 400
            assert batch["input"][1:].tolist() == labels[:-1].tolist()
            firsts.append(tokenizer.decode(batch["input"].tolist()))
        texts = list(data.training_documents(str(prepared))["text"])
        assert texts[0].startswith(firsts[0][:80]) and texts[-(-len(texts) // 2)].startswith(firsts[1][:80])
        unseen = text_datasets.HuggingFaceTextDataset(data.HELD_OUT, str(prepared), tokenizer, 64)
        first = tokenizer.decode(next(iter(unseen))[0]["input"].tolist())
        held_out = list(data.held_out_documents(str(prepared))["text"])
        assert held_out[0].startswith(first[:80])
        assert (
            texts + held_out == list(data.load_documents(str(prepared))["text"]) and len(held_out) == len(texts) // 15
        )
    finally:
        for name in (data.DATASET, data.HELD_OUT):
            text_datasets.DATASETS.pop(name, None)


def test_prepare_for_touches_only_our_data_set(monkeypatch):
    calls = []
    monkeypatch.setattr(data, "prepare", calls.append)
    monkeypatch.setattr(data, "load_documents", calls.append)
    monkeypatch.setattr(data, "register_datasets", lambda: calls.append("registered"))

    def prepare_for(name, path, held_out=None):
        loader = SimpleNamespace(dataset=name, dataset_path=path)
        validator = SimpleNamespace(dataset="python_stdlib_validation", dataset_path=held_out)
        validator = SimpleNamespace(enable=held_out is not None, dataloader=validator)
        data.prepare_for(SimpleNamespace(dataloader=loader, validator=validator))

    for name, path in (("c4", "x"), ("Python_stdlib", "y"), ("python_stdlib", None)):
        prepare_for(name, path)
    assert calls == ["y", "registered", data.DEFAULT_FOLDER, "registered"]
    calls.clear()
    prepare_for("c4", "x", held_out="z")
    assert calls == ["z", "registered"]
