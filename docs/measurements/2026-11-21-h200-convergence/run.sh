#!/usr/bin/env bash
# Validation loss of the FP8 recipes against bf16 on real text: four H200 of one host, about eight minutes.
#   docs/measurements/2026-11-21-h200-convergence/run.sh 125m|350m OUTPUT_FOLDER
# Of 350m, STEPS and RUNS (recipes, one GPU each) may be given, and LIMIT, the seconds a run may take.
# All runs of a size see the same data in the same order from the same initial weights.
set -uo pipefail
size=$1 out=$2
export OMP_NUM_THREADS=4 PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD

docs/measurements/python_corpus.sh "$out/data.log"

common="model.vocab_size=8192 training.seq_length=2048 training.precision=bf16 data.train=[data/corpus/text] data.tokenizer.path=data/corpus/tokenizer.model
data.split=980,20,0 checkpoint.interval=0 logging.tensorboard=false logging.progress=false logging.interval=400 parallel.tensor=1 parallel.pipeline=1
training.global_batch_size=32 training.eval_interval=400 training.eval_steps=38 fp8.amax_history_len=1024 run_dir=runs/$size"
if [[ $size == 125m ]]; then # 116M parameters, 105M tokens
    model="model.num_layers=12 model.hidden_size=768 model.num_attention_heads=12 model.num_query_groups=4 model.ffn_hidden_size=3072 training.micro_batch_size=16
    training.steps=1600 optimizer.learning_rate=4e-4 optimizer.min_learning_rate=4e-5 optimizer.warmup_steps=150"
else # 350M parameters
    model="model.num_layers=24 model.hidden_size=1024 model.num_attention_heads=16 model.num_query_groups=8 model.ffn_hidden_size=3584 training.micro_batch_size=16
    training.steps=${STEPS:-600} optimizer.learning_rate=3e-4 optimizer.min_learning_rate=3e-5 optimizer.warmup_steps=100"
fi

train() { # gpu name recipe
    CUDA_VISIBLE_DEVICES=$1 timeout ${LIMIT:-280} python3 pretrain_gpt.py --config configs/quickstart.yaml $common $model name="$2" fp8.recipe="$3" \
        >"$out/$2.log" 2>&1 || { echo "$2 failed"; tail -n 25 "$out/$2.log"; }
    tail -n 1 "runs/$size/$2/metrics.jsonl" | cut -c1-420
}

if [[ $size == 125m ]]; then
    (train 0 bf16 none; train 0 bf16-again none) & (train 1 delayed delayed; train 1 rowwise rowwise) &
    (train 2 current current; train 2 current-again current) & (train 3 blockwise blockwise; train 3 blockwise-again blockwise) & wait
else
    gpu=0
    for recipe in ${RUNS:-none delayed blockwise current}; do
        train $gpu "${recipe/none/bf16}" "$recipe" &
        gpu=$((gpu + 1))
    done
    wait
fi
tar -C runs --exclude=checkpoints -czf "$out/$size.tgz" "$size"
