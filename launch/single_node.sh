#!/usr/bin/env bash
# Train on all GPUs of this machine; on a machine without GPUs, in one process on the CPU.
#
#   launch/single_node.sh CONFIG [section.key=value ...]
#   NPROC_PER_NODE=4 launch/single_node.sh configs/quickstart.yaml
#
# Paths are relative to the repository. What is exported below can be set by you instead.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ $# -ge 1 ]] || { echo "usage: launch/single_node.sh CONFIG [section.key=value ...]" >&2; exit 2; }
[[ -f $1 ]] || { echo "error: no such config: $1; there are: $(echo configs/*.yaml)" >&2; exit 2; }
command -v torchrun >/dev/null || { echo "error: torchrun is not on PATH; after make venv: . .venv/bin/activate" >&2; exit 2; }
config=$1
shift

# `gpu` lets torch count, so that CUDA_VISIBLE_DEVICES counts too. nvidia-smi prints other lines where it finds none.
if [[ $(nvidia-smi --list-gpus 2>/dev/null) == "GPU "* ]]; then
    processes=gpu threads=8
else
    processes=1 threads=1
fi
# Threads for the host's share of the work; torchrun would set 1.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
# Long runs allocate many sizes; growing segments keep that from fragmenting the GPU's memory.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# Seconds from a stop signal until torchrun kills: time to finish the step and save. Torch 2.11 always takes 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}

exec torchrun --standalone --nproc-per-node "${NPROC_PER_NODE:-$processes}" pretrain_gpt.py --config "$config" "$@"
