#!/usr/bin/env bash
# Time whole steps of Llama-3-8B in Megatron-LM with Transformer Engine, data parallel on the GPUs of this host.
#
#     MEGATRON=/path/to/Megatron-LM benchmarks/peers/megatron_lm.sh bf16|delayed|current [options of Megatron-LM]
#
# The options and the environment are NVIDIA's: Megatron-LM's examples/llama/train_llama3_8b_h100_fp8.sh and Megatron-Bridge's
# performance recipe for Llama-3-8B on eight H100s (perf_recipes/llama/h100/llama3.py). README.md beside this file lists the
# differences. Set GRADS=fp32 for gradients that are accumulated and reduced in fp32, as the other projects do; the default,
# bf16, is what NVIDIA publishes. transformer_engine must be importable.
# GPUS, STEPS and TIME_LIMIT (seconds) can be set in the environment.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
variant=${1:?give bf16, delayed or current}
: "${MEGATRON:?set it to a checkout of Megatron-LM}"
shift
gpus=${GPUS:-2} steps=${STEPS:-13} grads=${GRADS:-bf16}
log=${OUT:-$(mktemp -d)}/megatron-$variant-$grads.log

precision=(--bf16)
case $variant in
bf16) ;;
delayed) precision+=(--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather) ;;
current) precision+=(--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather) ;;
*)
  echo "$0: the variant must be bf16, delayed or current, not $variant" >&2
  exit 2
  ;;
esac
case $grads in
bf16) precision+=(--grad-reduce-in-bf16) ;;
fp32) precision+=(--accumulate-allreduce-grads-in-fp32) ;;
*)
  echo "$0: GRADS must be bf16 or fp32, not $grads" >&2
  exit 2
  ;;
esac

model=(
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
  --group-query-attention --num-query-groups 8 --kv-channels 128
  --seq-length 8192 --max-position-embeddings 8192
  --position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0
  --swiglu --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear --untie-embeddings-and-output-weights
  --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02
  --transformer-impl transformer_engine --attention-backend fused
  --cross-entropy-loss-fusion --cross-entropy-fusion-impl native # this version refuses `te`
)
training=(
  --micro-batch-size 1 --global-batch-size $((8 * gpus)) --train-iters "$steps" --seed 1234
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-decay-iters 1000 --lr-warmup-iters 200
  --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8
  --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --manual-gc --manual-gc-interval 100 --no-check-for-nan-in-loss-and-grad --rerun-mode disabled
)
data=(
  --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --make-vocab-size-divisible-by 128
  --data-cache-path /tmp/megatron-cache --split 99,1,0 --num-workers 1
  --no-create-attention-mask-in-dataloader --no-mmap-bin-files
)
logging=(--log-interval 1 --log-memory-interval 5 --log-throughput --eval-iters 0 --eval-interval 1000000 --distributed-timeout-minutes 5)

export PYTHONPATH=$MEGATRON${PYTHONPATH:+:$PYTHONPATH}
# Where apex is not installed, Transformer Engine's GEMM stands in for apex's fused weight gradient.
python3 -c "import fused_weight_gradient_mlp_cuda" 2>/dev/null || PYTHONPATH=$PYTHONPATH:$here
# As in Megatron-Bridge's recipe for this model in FP8 with data parallelism only
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TORCH_NCCL_AVOID_RECORD_STREAMS=1 TORCH_NCCL_HIGH_PRIORITY=1 NCCL_GRAPH_REGISTER=0 NCCL_NVLS_ENABLE=0
export NVTE_FWD_LAYERNORM_SM_MARGIN=${NVTE_FWD_LAYERNORM_SM_MARGIN:-20} NVTE_BWD_LAYERNORM_SM_MARGIN=${NVTE_BWD_LAYERNORM_SM_MARGIN:-20}
timeout --kill-after 10 "${TIME_LIMIT:-170}" torchrun --standalone --nproc-per-node "$gpus" "$MEGATRON/pretrain_gpt.py" \
  "${model[@]}" "${training[@]}" "${precision[@]}" "${data[@]}" "${logging[@]}" "$@" >"$log" 2>&1 ||
  echo "Megatron-LM $variant ended with status $? (124: time limit), see $log"
python3 "$here/summarize.py" "$log" --name "Megatron-LM $variant, $grads gradients $*" --tokens $((8 * 8192))
