#!/usr/bin/env bash
# From a fresh clone to the comparison: the same small model trained with AdamW, with gather-then-replicate Muon, with
# TorchTitan's DistMuon where it runs and with DMuon, on the same text, batches and initial weights; then a table and a
# picture. Needs Python 3.11+ and git, no download of data or weights. Uses all visible GPUs, or 4 processes on the CPU.
# Can be run again; each OUT is its own world, and nothing is removed from it but what a quickstart left there.
#   scripts/quickstart.sh [--steps N] [--out DIR]      (or STEPS=N OUT=DIR in the environment)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

STEPS=${STEPS:-30}
OUT=${OUT:-$ROOT/outputs/quickstart}
while [ $# -gt 0 ]; do
    case $1 in
        --steps) STEPS=${2:?--steps needs a number}; shift 2 ;;
        --out) OUT=${2:?--out needs a folder}; shift 2 ;;
        *) echo "unknown argument '$1'; usage: scripts/quickstart.sh [--steps N] [--out DIR]" >&2; exit 2 ;;
    esac
done
case $STEPS in
    '' | *[!0-9]* | 0) echo "--steps $STEPS: expected a number of at least 1" >&2; exit 2 ;;
esac

claim() {   # claim DIR: make and mark a folder, as torchtitan_dmuon/outputs.py does; one that holds anything else is left
    if [ ! -e "$1/.torchtitan_dmuon" ] && [ -n "$(ls -A "$1" 2>/dev/null)" ]; then
        echo "$1 holds other files and is left as it is: choose a new or empty folder with --out" >&2
        exit 2
    fi
    mkdir -p "$1"
    : >"$1/.torchtitan_dmuon"
}
claim "$OUT"
OUT=$(cd "$OUT" && pwd)   # relative to where the caller is, before leaving it
ensure_venv
cd "$ROOT"

# GPUs: a mesh of two replicas where their number allows it. CPU: four processes, 2 x 2. bf16 only where it is fast.
read -r launcher ranks replicas shards dtype < <("$VENV_PYTHON" - <<'PYTHON'
import torch
from torchtitan_dmuon.newton_schulz import cpu_has_fast_bf16

gpus = torch.cuda.device_count()
ranks = gpus or 4
replicas = 2 if ranks >= 4 and ranks % 2 == 0 else 1
print("torchrun" if gpus else "fork", ranks, replicas, ranks // replicas, "bfloat16" if gpus or cpu_has_fast_bf16() else "float32")
PYTHON
)
export TOKENIZERS_PARALLELISM=true
"$VENV_PYTHON" -m torchtitan_dmuon prepare-data --out outputs/python_stdlib

show_steps() {   # keeps rank 0's step lines of a training log, behind the run's name
    local line
    while IFS= read -r line; do
        case $line in
            *'[rank0]:'*'step: '*)   # ranks write at once under torchrun: two lines may arrive as one
                line=${line##*'[rank0]:'}
                line=${line#*step: }
                printf '  %-12s step: %s\n' "$1" "${line%%'[rank'*}" ;;
            *'[rank'*) ;;
            *'step: '*) printf '  %-12s step: %s\n' "$1" "${line#*step: }" ;;
        esac
    done
}

launch() {   # launch CONFIG FLAGS...: CPU ranks fork from one import, which saves half a minute a run on two cores
    local config=$1
    shift
    if [ "$launcher" = fork ]; then
        "$VENV_PYTHON" -m torchtitan_dmuon.local "$ranks" --config "$config" "$@"
    else   # all ranks go to the log: a failure may be another rank's than 0
        LOG_RANK='' NGPU=$ranks CONFIG_FILE=$config TORCHRUN=$VENV/bin/torchrun scripts/run_train.sh "$@"
    fi
}

train() {   # train NAME: one run in $OUT/NAME
    local name=$1 log=$OUT/$1/train.log entry
    claim "$OUT/$name"
    for entry in "$OUT/$name"/*; do   # a checkpoint left there would be resumed instead of trained
        case ${entry##*/} in
            checkpoint | tb | comm_traces | structured_logs | config*.toml | ownership_plan*.json | train.log) rm -rf "$entry" ;;
            '*') ;;
            *) echo "$entry is not of a quickstart: move it away, or choose another --out" >&2; exit 2 ;;
        esac
    done
    echo "$name: $STEPS steps on $ranks processes ($replicas x $shards, $dtype), full log in $log"
    if ! launch "train_configs/debug_$name.toml" \
        --dump_folder "$OUT/$name" --training.steps "$STEPS" --training.mixed_precision_param "$dtype" \
        --parallelism.data_parallel_replicate_degree "$replicas" --parallelism.data_parallel_shard_degree "$shards" \
        --validator.enable --validator.freq "$((STEPS % 3 ? STEPS : STEPS / 3))" \
        --checkpoint.enable --metrics.disable_color_printing 2>&1 | tee "$log" | show_steps "$name"; then
        echo "$name failed; from the first error in $log:" >&2
        { sed -n '/Traceback\|error: /,$p' "$log" | head -n 40; } >&2 || true
        exit 1
    fi
}

begin=$SECONDS
names=(adamw gather_muon dist_muon dmuon)
if [ "$ranks" = 1 ] || [ "$dtype" != bfloat16 ]; then
    echo "dist_muon is left out: it needs two ranks, and its updates bf16 that is not emulated"
    names=(adamw gather_muon dmuon)
fi
for name in "${names[@]}"; do
    train "$name"
done
"$VENV_PYTHON" -m torchtitan_dmuon compare "${names[@]/#/$OUT/}" \
    --skip $((STEPS > 10 ? 5 : STEPS / 2)) --json "$OUT/compare.json" --plot "$OUT/compare.png"
echo "${#names[@]} runs and the comparison: $((SECONDS - begin)) s; event files and checkpoints are in $OUT"
