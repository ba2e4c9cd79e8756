#!/usr/bin/env bash
# Loss curves of one seed under several layouts, through NCCL on 4 GPUs of one host, and the step time of Llama-3-8B's shape cut to 4 layers on one GPU.
#   docs/measurements/2026-11-21-h200-layouts/run.sh OUTPUT_FOLDER
set -uo pipefail
out=$1
export OMP_NUM_THREADS=4 PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD
python3 - <<'PY'
import sys
sys.path.insert(0, "tools")
import quickstart
quickstart.write_file_list()
PY
python3 tools/train_tokenizer.py --text-files --input-list data/quickstart/files.txt --output data/quickstart/tokenizer.model --vocab-size 2048 --overwrite
python3 tools/preprocess_data.py --text-files --input-list data/quickstart/files.txt --tokenizer sentencepiece --tokenizer-path data/quickstart/tokenizer.model --output-prefix data/quickstart/stdlib --workers 8 --overwrite 2>/dev/null

model="model.num_layers=8 model.hidden_size=768 model.num_attention_heads=12 model.num_query_groups=4 model.ffn_hidden_size=2048
training.steps=40 training.seq_length=1024 training.micro_batch_size=2 training.global_batch_size=16 training.precision=bf16
training.eval_interval=0 optimizer.learning_rate=2e-4 optimizer.min_learning_rate=2e-5 optimizer.warmup_steps=20 checkpoint.interval=0 logging.tensorboard=false
logging.interval=20 run_dir=runs/nccl"

train() { # gpus name tensor pipeline recipe
    local count
    count=$(echo "$1" | tr ',' '\n' | wc -l)
    CUDA_VISIBLE_DEVICES=$1 timeout 120 torchrun --standalone --nproc-per-node "$count" pretrain_gpt.py --config configs/quickstart.yaml \
        $model name="$2" parallel.tensor="$3" parallel.pipeline="$4" fp8.recipe="$5" >"$out/$2.log" 2>&1 || { echo "$2 failed"; tail -n 30 "$out/$2.log"; }
}

train 0 one-gpu-bf16 1 1 none & train 1 one-gpu-current 1 1 current & train 2 one-gpu-delayed 1 1 delayed & train 3 one-gpu-bf16-again 1 1 none & wait
train 0,1 tp2-sp-bf16 2 1 none & train 2,3 pp2-bf16 1 2 none & wait
train 0,1 dp2-bf16 1 1 none & train 2,3 tp2-sp-delayed 2 1 delayed & wait
train 0,1 pp2-delayed 1 2 delayed & train 2,3 dp2-delayed 1 1 delayed & wait
train 0,1,2,3 tp2-sp-pp2-bf16 2 2 none
train 0,1,2,3 tp2-sp-pp2-current 2 2 current
cd runs/nccl
python3 ../../tools/compare_runs.py one-gpu-bf16 one-gpu-bf16-again tp2-sp-bf16 pp2-bf16 dp2-bf16 tp2-sp-pp2-bf16 --png "$out/layouts-bf16.png"
python3 ../../tools/compare_runs.py one-gpu-delayed tp2-sp-delayed pp2-delayed dp2-delayed --png "$out/layouts-delayed.png"
python3 ../../tools/compare_runs.py one-gpu-current tp2-sp-pp2-current
python3 ../../tools/compare_runs.py one-gpu-bf16 one-gpu-current one-gpu-delayed --png "$out/recipes.png"
cd ../..
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1
timeout 150 python3 tools/bench_step.py --config configs/llama3-8b.yaml --variants bf16,current,delayed --warmup 3 --steps 6 --rounds 2 \
    --json "$out/llama3-8b-4-layers.json" parallel.tensor=1 parallel.pipeline=1 model.num_layers=4 training.global_batch_size=4 2>&1 | grep -v Warning | tail -n 20
