#!/usr/bin/env bash
# What this folder holds. `layers` takes one H200, `training` four of one host; each writes into OUTPUT_FOLDER.
#   docs/measurements/2026-11-21-h200-fp8-engine/run.sh layers|training OUTPUT_FOLDER
set -uo pipefail
part=$1 out=$2
export OMP_NUM_THREADS=4 PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD

if [[ $part == layers ]]; then
    ours=megafp8:bf16,megafp8:delayed,megafp8:delayed+fast,megafp8:current,megafp8:rowwise,megafp8:blockwise
    timeout 150 python3 -m tools.bench_layer --variants eager,compiled,$ours --rounds 3 --steps 6 --json "$out/layers.json" 2>"$out/layers.err" | tee "$out/layers.txt"
    timeout 120 python3 -m tools.bench_layer --variants compiled,megafp8:delayed+fast,megafp8:current,megafp8:rowwise,megafp8:blockwise --micro-batches 8 --rounds 2 --steps 2 \
        2>/dev/null | tee "$out/layers-8-micro-batches.txt"
    timeout 100 python3 -m tools.bench_casts | tee "$out/casts.txt"
    timeout 60 python3 -m tools.bench_layer --variants compiled,megafp8:delayed+fast --profile megafp8:delayed+fast --rounds 1 --steps 3 >"$out/profile.txt" 2>&1
    exit
fi

docs/measurements/python_corpus.sh "$out/data.log"

# A Llama-shaped model of 124M parameters.
model="model.num_layers=12 model.hidden_size=768 model.num_attention_heads=12 model.num_query_groups=4 model.ffn_hidden_size=3072 model.vocab_size=8192
training.seq_length=2048 training.precision=bf16 data.train=[data/corpus/text] data.tokenizer.path=data/corpus/tokenizer.model data.split=980,20,0
checkpoint.interval=0 logging.tensorboard=false logging.progress=false parallel.tensor=1 parallel.pipeline=1"

train() { # gpus name overrides...
    local gpus=$1 name=$2 count
    shift 2
    count=$(echo "$gpus" | tr ',' '\n' | wc -l)
    CUDA_VISIBLE_DEVICES=$gpus timeout 330 torchrun --standalone --nproc-per-node "$count" pretrain_gpt.py --config configs/quickstart.yaml \
        $model name="$name" "$@" >"$out/$name.log" 2>&1 || { echo "$name failed"; tail -n 25 "$out/$name.log"; }
}

# Layouts through NCCL against one GPU, 40 steps.
short="training.steps=40 training.micro_batch_size=2 training.global_batch_size=16 training.eval_interval=0 optimizer.learning_rate=2e-4
optimizer.min_learning_rate=2e-5 optimizer.warmup_steps=20 logging.interval=20 run_dir=runs/layouts"
train 0 one-delayed $short fp8.recipe=delayed & train 1 one-current $short fp8.recipe=current & train 2 one-rowwise $short fp8.recipe=rowwise & train 3 one-blockwise $short fp8.recipe=blockwise & wait
train 0,1,2,3 tp2-sp-pp2-delayed $short fp8.recipe=delayed parallel.tensor=2 parallel.pipeline=2 fp8.report_interval=20
train 0,1 tp2-sp-current $short fp8.recipe=current parallel.tensor=2 & train 2,3 tp2-sp-rowwise $short fp8.recipe=rowwise parallel.tensor=2 & wait
train 0,1 tp2-sp-blockwise $short fp8.recipe=blockwise parallel.tensor=2 & train 2,3 dp2-delayed $short fp8.recipe=delayed & wait
cd runs/layouts
{
    python3 ../../tools/compare_runs.py one-delayed tp2-sp-pp2-delayed dp2-delayed
    for recipe in current rowwise blockwise; do python3 ../../tools/compare_runs.py one-$recipe tp2-sp-$recipe; done
} | tee "$out/layouts.txt"
cd ../..
timeout 120 torchrun --standalone --nproc-per-node 4 tools/bench_step.py --config configs/llama3-8b.yaml --variants bf16,delayed --warmup 2 --steps 3 --rounds 1 \
    --json "$out/llama3-8b-tp2-pp2.json" parallel.tensor=2 parallel.pipeline=2 training.global_batch_size=8 2>&1 | grep -v Warning | tail -n 6 | tee "$out/llama3-8b-tp2-pp2.txt"

# Convergence: the same data in the same order under four recipes.
long="training.steps=${STEPS:-600} training.micro_batch_size=16 training.global_batch_size=32 training.eval_interval=100 training.eval_steps=16
optimizer.learning_rate=6e-4 optimizer.min_learning_rate=6e-5 optimizer.warmup_steps=60 logging.interval=100 run_dir=runs/convergence"
train 0 bf16 $long fp8.recipe=none & train 1 delayed $long fp8.recipe=delayed & train 2 current $long fp8.recipe=current & train 3 blockwise $long fp8.recipe=blockwise & wait
cd runs/convergence
python3 ../../tools/compare_runs.py bf16 delayed current blockwise --png "$out/convergence.png" | tee "$out/convergence.txt"
for run in bf16 delayed current blockwise; do cp $run/metrics.jsonl "$out/convergence-$run.jsonl"; tail -n 1 $run/metrics.jsonl | cut -c1-400; done
