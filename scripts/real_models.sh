#!/usr/bin/env bash
# Real models (transformers, lerobot) and training loops of others (Trainer, Accelerate, Fabric) against one process, from
# random weights: nothing is downloaded but packages. Says which cases it leaves out and why.
#   scripts/real_models.sh [pytest arguments]      e.g. scripts/real_models.sh -k llama
# VENV names its environment (default: .venv-real-models); PYTHON its interpreter: lerobot needs Python 3.12 or later.
set -euo pipefail
VENV=${VENV:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv-real-models}
VENV_EXTRAS=real-models
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
for newer in python3.12 python3.13; do
    if [ -z "${PYTHON:-}" ] && "$newer" -c '' 2>/dev/null; then PYTHON=$newer; fi
done
ensure_venv
cd "$ROOT"

# lerobot asks for an older torch than it needs: without its dependencies, which the extra names as far as policies import.
if "$VENV_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 12))' && ! "$VENV_PYTHON" -m pip show --quiet lerobot; then
    "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps lerobot==0.6.1
fi
OMP_NUM_THREADS=1 PYTHONPATH=$ROOT exec "$VENV_PYTHON" -m pytest tests/real_models -rs "$@"
