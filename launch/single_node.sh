#!/usr/bin/env bash
# Train on all GPUs of this machine.
#
#   launch/single_node.sh CONFIG [section.key=value ...]
#   NPROC_PER_NODE=4 launch/single_node.sh configs/quickstart.yaml
set -euo pipefail
cd "$(dirname "$0")/.."
[[ $# -ge 1 ]] || { echo "usage: launch/single_node.sh CONFIG [section.key=value ...]" >&2; exit 2; }
[[ -f $1 ]] || { echo "error: no such config: $1; there are: $(echo configs/*.yaml)" >&2; exit 2; }
config=$1
shift

# One process a GPU; on a machine without GPUs one process, on the CPU.
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
processes=${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}

# Tokenizing and loading threads beside the training process; torchrun would set 1.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((gpus > 0 ? 8 : 1))}
# Long runs allocate many sizes; growing segments keep that from fragmenting the GPU's memory.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

exec torchrun --standalone --nproc-per-node "$processes" pretrain_gpt.py --config "$config" "$@"
