#!/bin/bash
# Written for this test, in the style of a script for Megatron-LM's pretrain_gpt.py.
GPUS=8
LAYERS=${LAYERS:-24}
DATA="0.3 data/code 0.7 data/web"
touch /tmp/must-not-exist-$(echo executed)

MODEL_ARGS=(
    --num-layers $LAYERS   # a comment with --hidden-size 1
    --hidden-size 2048
    --num-attention-heads 16
    --group-query-attention --num-query-groups=4
    --swiglu
    --normalization RMSNorm
    --position-embedding-type rope
    --rotary-base 500000
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0.0
    --max-position-embeddings 4096
    --num-experts 16
    --moe-router-topk 4
    --moe-layer-freq [0]*2+[1]*22
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-3
)
OPTIONS="\
  --seq-length 4096 \
  --micro-batch-size 2 \
  --global-batch-size 512 \
  --train-samples 512000 \
  --lr 3e-4 --min-lr 3.0e-5 --lr-decay-style cosine \
  --lr-warmup-fraction 0.01 \
  --bf16 --fp8-recipe tensorwise --fp8-format hybrid --fp8-amax-history-len 16 "
if [ -n "${X}" ]; then
    RUN_ARGS+=("--save $OUT/run-1" --tensorboard-dir "logs/$GPUS")
fi
torchrun --nproc_per_node $GPUS pretrain_gpt.py ${MODEL_ARGS[@]} $OPTIONS \
    --data-path $DATA --split 98,2,0 --frobnicate 3 \
    --tensor-model-parallel-size 2 --use-distributed-optimizer --multi-latent-attention-is-unknown
echo "--hidden-size 99"
