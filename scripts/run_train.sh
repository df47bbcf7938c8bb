#!/usr/bin/env bash
# One node, the way TorchTitan's own script is used:
#   NGPU=8 CONFIG_FILE=train_configs/llama3_8b_dmuon.toml scripts/run_train.sh --training.steps 10
#   MODULE=llama3 CONFIG=llama3_debugmodel scripts/run_train.sh        a plain registry configuration, unchanged
#
#   NGPU         processes to start (default 8)
#   CONFIG_FILE  TOML file (default train_configs/debug_dmuon.toml)
#   LOG_RANK     ranks whose output is shown, with commas (default 0; empty: all)
#   TORCHRUN     launcher (default: the one of .venv, else torchrun)
# All arguments go to the trainer and win over the file.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

NGPU=${NGPU:-8}
CONFIG_FILE=${CONFIG_FILE:-$ROOT/train_configs/debug_dmuon.toml}
LOG_RANK=${LOG_RANK-0}
if [ -z "${TORCHRUN:-}" ]; then
    TORCHRUN=torchrun
    if [ -x "${VENV:-$ROOT/.venv}/bin/torchrun" ]; then
        TORCHRUN=${VENV:-$ROOT/.venv}/bin/torchrun
    fi
fi
if [ -n "${MODULE:-}" ]; then
    choice=(--module "$MODULE" --config "${CONFIG:?set CONFIG with MODULE, e.g. CONFIG=llama3_debugmodel}")
else
    choice=(--config "$CONFIG_FILE")
fi

# Fewer fragments on GPUs; CPU ranks share the cores.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Port 0: any free one, so that two jobs on one machine do not meet.
exec "$TORCHRUN" --nnodes 1 --nproc-per-node "$NGPU" --rdzv-backend c10d --rdzv-endpoint localhost:0 \
    --local-ranks-filter "$LOG_RANK" --role rank --tee 3 \
    -m torchtitan_dmuon.train "${choice[@]}" "$@"
