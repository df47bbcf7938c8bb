"""The `dmuon` command: one name per tool, each in its own module.

Decides only which module a sub-command runs. A tool is imported when it is called, so that `dmuon compare` needs no
TorchTitan and a tool that this version lacks is refused by name.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence

from torchtitan_dmuon import __version__

MAX_WORLD = 2**17  # ranks of a plan: a plan has figures of each, and 100,000 take minutes
SLOW_WORLD = 2**13

BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SENT = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}

# name -> (module with main(argv, prog) -> exit code, one line of help)
COMMANDS = {
    "compare": ("torchtitan_dmuon.compare", "compare the event files of finished runs"),
    "prepare-data": ("torchtitan_dmuon.titan.data", "make the quickstart's text and tokenizer"),
    "convert-config": ("torchtitan_dmuon.titan.convert", "write a TOML file of an older TorchTitan anew"),
    "plan": ("torchtitan_dmuon.plan", "owners, balance, memory and bytes of a configuration"),
    "simulate": ("torchtitan_dmuon.simulate", "step time of a configuration on a described cluster"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit code: 2 for a command that is unknown or not part of this version."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="dmuon",
        description="Tools around training with one owner per matrix.",
        epilog="\n".join(f"  {name:<14}{text}" for name, (_, text) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dmuon {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments (COMMAND --help lists them)")
    args = parser.parse_args(argv)
    module, _ = COMMANDS[args.command]
    if importlib.util.find_spec(module) is None:
        print(f"dmuon: {args.command!r} is not built yet in this version", file=sys.stderr)
        return 2
    return importlib.import_module(module).main(args.arguments, prog=f"dmuon {args.command}")


def in_unit(largest: float, units: Mapping[str, float]) -> tuple[str, float]:
    """The greatest of these units in which ``largest`` is at least 1, and how much one of it is; else the smallest, and
    for nothing at all the greatest. ``units`` are in order."""
    pairs = list(units.items())
    fitting = [pair for pair in pairs if pair[1] <= largest or not largest]
    return fitting[-1] if fitting else pairs[0]


def read_worlds(text: str) -> list[int]:
    """The numbers of ranks in "8,64,256". ValueError for what is no list of positive numbers, or more ranks than can be
    planned."""
    words = text.split(",")
    if not all(word.isascii() and word.isdecimal() and 0 < int(word[:20]) <= MAX_WORLD for word in words):
        raise ValueError(f"--world {text[:40]}: expected positive numbers up to {MAX_WORLD:,}, such as 8 or 8,64,256")
    return [int(word) for word in words]


if __name__ == "__main__":
    sys.exit(main())
