#!/usr/bin/env bash
# Everything a change must pass: lint, types of the core, tests. Needs Python 3.11+ and git; makes .venv the first time.
#   scripts/test.sh [pytest arguments]      e.g. scripts/test.sh tests/test_compare.py -k ratio
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
ensure_venv
cd "$ROOT"

"$VENV_PYTHON" -m ruff check .
"$VENV_PYTHON" -m ruff format --check torchtitan_dmuon tests scripts
"$VENV_PYTHON" -m mypy torchtitan_dmuon/*.py torchtitan_dmuon/runtime torchtitan_dmuon/titan/data.py
# One thread per process: the tests fork ranks, and more threads than cores make them slow.
OMP_NUM_THREADS=1 exec "$VENV_PYTHON" -m pytest "$@"
