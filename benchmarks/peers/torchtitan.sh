#!/usr/bin/env bash
# Time whole steps of Llama-3-8B in torchtitan 0.2.2 with torchao, on the GPUs of this host.
#
#     benchmarks/peers/torchtitan.sh bf16|fp8|rowwise [options of torchtitan]
#
# fp8 is tensorwise scaling with FP8 all-gather and precomputed scales, as torchtitan's docs/float8.md advises. rowwise
# is torchao's other recipe, which gathers in bf16. Options that follow override these, for example
# `--parallelism.fsdp_reshard_after_forward never` or `--activation_checkpoint.mode selective`.
# torchtitan and torchao must be importable. GPUS, STEPS and TIME_LIMIT (seconds) can be set in the environment.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
variant=${1:?give bf16, fp8 or rowwise}
shift
gpus=${GPUS:-2} steps=${STEPS:-13}
log=${OUT:-$(mktemp -d)}/torchtitan-$variant.log

converters=()
case $variant in
bf16) ;;
fp8) converters=(
  --model.converters quantize.linear.float8
  --quantize.linear.float8.enable_fsdp_float8_all_gather
  --quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp
) ;;
rowwise) converters=(
  --model.converters quantize.linear.float8
  --quantize.linear.float8.recipe_name rowwise
) ;;
*)
  echo "$0: the variant must be bf16, fp8 or rowwise, not $variant" >&2
  exit 2
  ;;
esac

export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True # as torchtitan's run_train.sh sets it
timeout --kill-after 10 "${TIME_LIMIT:-170}" torchrun --standalone --nproc-per-node "$gpus" --local-ranks-filter 0 --tee 3 \
  -m torchtitan.train --job.config_file "$here/torchtitan.toml" \
  --training.global_batch_size $((8 * gpus)) --training.steps "$steps" \
  "${converters[@]}" "$@" >"$log" 2>&1 || echo "torchtitan $variant ended with status $? (124: time limit), see $log"
python3 "$here/summarize.py" "$log" --name "torchtitan $variant $*" --tokens $((8 * 8192))
