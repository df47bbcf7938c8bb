"""The `dmuon` command: one name per tool, each in its own module.

Decides only which module a sub-command runs. A tool is imported when it is called, so that `dmuon compare` needs no
TorchTitan and a tool that this version lacks is refused by name.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence

# name -> (module with main(argv, prog) -> exit code, one line of help)
COMMANDS = {
    "compare": ("torchtitan_dmuon.compare", "compare the event files of finished runs"),
    "prepare-data": ("torchtitan_dmuon.titan.data", "make the quickstart's text and tokenizer"),
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
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments (COMMAND --help lists them)")
    args = parser.parse_args(argv)
    module, _ = COMMANDS[args.command]
    if importlib.util.find_spec(module) is None:
        print(f"dmuon: {args.command!r} is not built yet in this version", file=sys.stderr)
        return 2
    return importlib.import_module(module).main(args.arguments, prog=f"dmuon {args.command}")


if __name__ == "__main__":
    sys.exit(main())
