"""`python -m torchtitan_dmuon`: the `dmuon` command where no script is installed."""

import sys

from torchtitan_dmuon.cli import main

if __name__ == "__main__":
    sys.exit(main())
