#!/usr/bin/env bash
# Train on all GPUs of this machine; on a machine without GPUs, in one process on the CPU.
#
#   launch/single_node.sh CONFIG [section.key=value ...]
#   NPROC_PER_NODE=4 launch/single_node.sh configs/quickstart.yaml
#
# MAX_RESTARTS     restarts after a failure (0)
# NPROC_PER_NODE   processes (the GPUs)
# LOG_DIR          keep what each rank prints, in files below this folder
# SCRIPT           the command that the ranks run (pretrain), for example check-cluster before a long run; or a script
#
# Exit codes: 0 done, or stopped cleanly by SIGTERM or Ctrl-C; 2 a fault of config, data or checkpoint, which is not
# restarted; 1 another failure. docs/launching.md describes recovery from failures.
#
# Paths are relative to the folder above this script's. What is exported below can be set by you instead.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ $# -ge 1 ]] || { echo "usage: launch/single_node.sh CONFIG [section.key=value ...]" >&2; exit 2; }
[[ -f $1 ]] || { echo "error: no such config: $1; there are: $(ls ./*.yaml configs/*.yaml 2>/dev/null | xargs)" >&2; exit 2; }
python -c 'import importlib.util as i; exit(not i.find_spec("torch"))' || { echo "error: the python on PATH has no torch; after make venv: . .venv/bin/activate" >&2; exit 2; }
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
# Seconds from a stop signal until ranks are killed: time to finish the step and save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}

exec python -m megafp8 launch \
    --standalone \
    --nproc-per-node "${NPROC_PER_NODE:-$processes}" \
    --max-restarts "${MAX_RESTARTS:-0}" \
    ${LOG_DIR:+--log-dir "$LOG_DIR" --tee 3} \
    "${SCRIPT:-pretrain}" --config "$config" "$@"
