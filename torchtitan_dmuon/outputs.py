"""Where a command may write. Standard library alone, but for pictures.

Decides: how a file or folder shows that this package made it, and what becomes of one that is already there. Does not
decide what is written. Keeps: nothing that this package did not make and mark is removed, renamed or overwritten unless
the user says so (`--overwrite`), and that is known before any work.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARK = "written by torchtitan_dmuon"  # somewhere near the beginning or the end of every file of a command
OVERWRITE = "write also over files that no command of ours wrote"
_READ_BYTES = 1 << 16
_FOLDER_MARK = ".torchtitan_dmuon"
_PICTURE_KEYS = {".png": "Software", ".pdf": "Creator", ".svg": "Creator", ".ps": "Creator", ".eps": "Creator"}


def add_output_arguments(parser: argparse.ArgumentParser, picture: bool = True) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    if picture:
        parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw a picture")
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE)


def parse_args(parser: argparse.ArgumentParser, argv: Any) -> argparse.Namespace:
    """The arguments; the process ends with code 2 and one line where an output cannot be written."""
    args = parser.parse_args(argv)
    try:
        prepare_outputs(getattr(args, "plot", None), getattr(args, "json", None), overwrite=args.overwrite)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    return args


def prepare_outputs(picture: Path | None, *others: Path | None, overwrite: bool = False) -> None:
    """Before any work: make the folders of the files that are asked for. ValueError for a path that is a folder or a
    file of somebody else's, for two of one name, and for a picture of an unknown kind; OSError where a folder cannot be
    made."""
    if picture is not None:
        from matplotlib.figure import Figure

        formats = Figure().canvas.get_supported_filetypes()
        if picture.suffix.lower().removeprefix(".") not in formats:
            raise ValueError(f"--plot {picture}: expected a file that ends in one of .{', .'.join(sorted(formats))}")
    asked = [path for path in (picture, *others) if path is not None]
    for path in asked:
        if path.is_dir():
            raise ValueError(f"{path} is a folder: expected a file to write")
        if path.is_file() and not overwrite and not _is_ours(path):  # a device or a pipe takes what comes
            raise ValueError(f"{path} is there and no command of ours wrote it: name another file, or add --overwrite")
    if len({path.resolve() for path in asked}) < len(asked):
        raise ValueError(f"two outputs would go into one file: {', '.join(map(str, asked))}")
    for path in asked:
        path.parent.mkdir(parents=True, exist_ok=True)


def _is_ours(path: Path) -> bool:
    """Whether the file has our mark, or nothing in it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_READ_BYTES)
        file.seek(max(0, size - _READ_BYTES))
        return size == 0 or MARK.encode() in start or MARK.encode() in file.read()


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({"mark": MARK, **data}, indent=1) + "\n")


def save_picture(figure: Any, path: Path, dpi: int) -> None:
    key = _PICTURE_KEYS.get(path.suffix.lower())
    figure.savefig(path, dpi=dpi, metadata={key: MARK} if key else None)


def refuse_foreign(folder: Path, maker: str) -> None:
    """ValueError for a folder that holds anything, and for a file in its place."""
    if folder.is_dir():
        held = sorted(os.listdir(folder))
        if held:
            raise ValueError(
                f"{folder} holds other files ({', '.join(held[:3])}{', ...' if held[3:] else ''}) and is left as it "
                f"is: expected a new or empty folder, or one that {maker} made"
            )
    elif folder.exists():
        raise ValueError(f"{folder} is a file: expected a folder to make")


def claim(folder: Path, maker: str) -> None:
    """Make and mark a folder; ValueError for one that holds anything and has no mark."""
    if not (folder / _FOLDER_MARK).exists():
        refuse_foreign(folder, maker)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _FOLDER_MARK).touch()


def refuse_unlike(path: Path, mark: str) -> None:
    """ValueError for a file without this text, and for a folder in its place."""
    if path.exists() and (path.is_dir() or mark not in path.read_text(encoding="utf-8", errors="replace")):
        raise ValueError(f"{path} is there and no run wrote it")


def write_keeping(path: Path, text: str) -> Path | None:
    """Write a text file. Another text in its place is kept under the next free number (config.toml as config-1.toml);
    returns that name. Others may write the same file at the same time: each writes all of its own."""
    kept = None
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        if path.exists() and path.read_bytes() != unfinished.read_bytes():
            numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
            kept = next(name for name in numbered if not os.path.lexists(name))
            path.rename(kept)
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    return kept
