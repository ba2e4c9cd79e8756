#!/usr/bin/env bash
# Train on several machines: start this on each of them, the same way. They meet at HEAD_NODE (c10d rendezvous).
#
#   NNODES=4 HEAD_NODE=node0 RDZV_ID=run1 launch/multi_node.sh CONFIG [section.key=value ...]
#
# NNODES           machines in the job
# HEAD_NODE        name or address of one of them, reachable from all; HEAD_PORT is 29400 unless set
# RDZV_ID          any word that is the same on all machines of this job, and of no other
# MAX_RESTARTS     restarts after a failure (3)
# NPROC_PER_NODE   processes on each machine (its GPUs)
# LOG_DIR          keep what each rank prints, in files below this folder
# SCRIPT           the command that the ranks run (pretrain), for example check-cluster before a long run; or a script
# LOCAL_ADDR       this machine's address, where the others cannot resolve its host name
# STOPPED_EXIT_CODE  exit code after a clean stop (0), for schedulers that start again what did not end with 0
#
# Exit codes: 0 done, or stopped cleanly by SIGTERM or Ctrl-C on any machine; 2 a fault of config, data or checkpoint,
# which is not restarted; 1 another failure. docs/launching.md describes recovery from failures.
#
# Paths are relative to the folder above this script's. What is exported below can be set by you instead.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ $# -ge 1 ]] || { echo "usage: NNODES=N HEAD_NODE=HOST RDZV_ID=WORD launch/multi_node.sh CONFIG [section.key=value ...]" >&2; exit 2; }
[[ -f $1 ]] || { echo "error: no such config: $1; there are: $(ls ./*.yaml configs/*.yaml 2>/dev/null | xargs)" >&2; exit 2; }
for name in NNODES HEAD_NODE RDZV_ID; do
    [[ -n ${!name:-} ]] || { echo "error: $name is not set; this script's first lines say what it is" >&2; exit 2; }
done
python -c 'import importlib.util as i; exit(not i.find_spec("torch"))' || { echo "error: the python on PATH has no torch; after make venv: . .venv/bin/activate" >&2; exit 2; }
config=$1
shift

# `gpu` lets torch count, so that CUDA_VISIBLE_DEVICES counts too. nvidia-smi prints other lines where it finds none.
if [[ -z ${NPROC_PER_NODE:-} ]]; then
    [[ $(nvidia-smi --list-gpus 2>/dev/null) == "GPU "* ]] || { echo "error: no GPU found on $HOSTNAME; set NPROC_PER_NODE" >&2; exit 2; }
fi
# Threads for the host's share of the work; torchrun would set 1.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# Long runs allocate many sizes; growing segments keep that from fragmenting the GPU's memory.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# Seconds from a stop signal until ranks are killed: time to finish the step and save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}

# A restarted job resumes from its newest complete checkpoint by itself.
exec python -m megafp8 launch \
    --nnodes "$NNODES" \
    --nproc-per-node "${NPROC_PER_NODE:-gpu}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD_NODE:${HEAD_PORT:-29400}" \
    --rdzv-id "$RDZV_ID" \
    --max-restarts "${MAX_RESTARTS:-3}" \
    ${LOG_DIR:+--log-dir "$LOG_DIR" --tee 3} \
    ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} \
    "${SCRIPT:-pretrain}" --config "$config" "$@"
