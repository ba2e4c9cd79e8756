#!/usr/bin/env bash
# Validation loss of a small mixture of experts on real text, FP8 recipes against bf16: two GPUs.
#   [STEPS=770] docs/measurements/2026-11-22-experts/train.sh OUTPUT_FOLDER
# All runs see the same data in the same order from the same initial weights, but bf16-seed: other weights, another order.
# 6 layers of 512, 8 experts of 1,024 in each, 2 for each token: 65,536 tokens a step.
set -uo pipefail
out=$1 steps=${STEPS:-770}
export OMP_NUM_THREADS=4 PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD PYTORCH_ALLOC_CONF=expandable_segments:True

docs/measurements/python_corpus.sh "$out/data.log"

common="model.num_layers=6 model.hidden_size=512 model.num_attention_heads=8 model.num_query_groups=4 model.vocab_size=8192
model.moe.num_experts=8 model.moe.top_k=2 model.moe.ffn_hidden_size=1024 logging.expert_load_interval=20
training.seq_length=2048 training.precision=bf16 training.steps=$steps training.micro_batch_size=32 training.global_batch_size=32
training.eval_interval=$((steps / 2)) training.eval_steps=38 optimizer.learning_rate=6e-4 optimizer.min_learning_rate=6e-5 optimizer.warmup_steps=100
data.train=[data/corpus/text] data.tokenizer.path=data/corpus/tokenizer.model data.split=980,20,0 checkpoint.interval=0 logging.tensorboard=false
logging.progress=false logging.interval=100 parallel.tensor=1 parallel.pipeline=1 run_dir=runs/experts"
aux="model.moe.aux_loss=0.01"
bias="model.moe.score=sigmoid model.moe.selection_bias=true model.moe.bias_update_rate=0.001"
none="model.moe.score=sigmoid"

train() { # gpu name recipe overrides...
    local gpu=$1 name=$2 recipe=$3 start=$SECONDS
    shift 3
    CUDA_VISIBLE_DEVICES=$gpu timeout ${LIMIT:-300} python3 pretrain_gpt.py --config configs/quickstart.yaml $common name="$name" fp8.recipe="$recipe" "$@" \
        >"$out/$name.log" 2>&1 || { echo "$name failed"; tail -n 25 "$out/$name.log"; }
    echo "$name: $((SECONDS - start)) s, $(tail -n 1 "runs/experts/$name/metrics.jsonl" | cut -c1-300)"
}

# Two at a time on each GPU, since a run begins with some 20 seconds of the host's: their speeds say nothing.
(train 0 bf16 none $aux & train 0 delayed delayed $aux & wait; train 0 current current $aux & train 0 bias none $bias & wait) &
(train 1 bf16-seed none $aux seed=77 & train 1 blockwise blockwise $aux & wait; train 1 rowwise rowwise $aux & train 1 no-balance none $none & wait) &
wait
tar -C runs --exclude=checkpoints -czf "$out/experts.tgz" experts
