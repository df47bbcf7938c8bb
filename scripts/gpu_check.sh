#!/usr/bin/env bash
# What needs a GPU: the core on CUDA against the CPU, in a few minutes, from the source tree (torch 2.11 or later, nothing
# installed). With several GPUs every rank has one; with one GPU the world is one rank.
#   scripts/gpu_check.sh [OUT_DIR]      (PYTHON names the interpreter)
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OUT=${1:-${OUT:-$ROOT/outputs/gpu_check}}
mkdir -p "$OUT"
cd "$ROOT"
ranks=$("${PYTHON:-python3}" -c 'import torch; print(max(1, torch.cuda.device_count()))')
PYTHONPATH=$ROOT exec "${PYTHON:-python3}" -m torch.distributed.run --standalone --nproc-per-node "$ranks" scripts/gpu_check.py "$OUT"
