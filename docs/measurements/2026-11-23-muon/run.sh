#!/usr/bin/env bash
# Muon against AdamW: a grid of learning rates with one seed, then both at their best with two more.
#   bash docs/measurements/2026-11-23-muon/run.sh DATA OUT
# DATA: the quickstart's folder (tokenizer.model, stdlib.bin, stdlib.idx); OUT: where runs are written.
set -euo pipefail
data=$1 out=$2
export OMP_NUM_THREADS=1
train() { # name optimizer learning_rate seed
  [ -e "$out/$1/done" ] && return
  nice python pretrain_gpt.py --config configs/quickstart.yaml name="$1" run_dir="$out" seed="$4" device=cpu \
    data.train="[$data/stdlib]" data.tokenizer.path="$data/tokenizer.model" data.index_cache="$out/cache" \
    model.num_layers=3 model.hidden_size=96 model.num_attention_heads=4 model.num_query_groups=2 \
    model.ffn_hidden_size=256 parallel.tensor=1 parallel.pipeline=1 fp8.recipe=none \
    training.steps=400 training.seq_length=64 training.micro_batch_size=16 training.eval_interval=400 \
    training.eval_steps=40 training.evaluate=null optimizer.warmup_steps=40 \
    optimizer.name="$2" optimizer.learning_rate="$3" optimizer.min_learning_rate=0 \
    checkpoint.interval=0 logging.progress=false logging.tensorboard=false >"$out/$1.log" 2>&1
  touch "$out/$1/done"
}
mkdir -p "$out"
for rate in 3e-3 6e-3 1.2e-2; do
  train "adamw-$rate-1" adamw "$rate" 1
  train "muon-$rate-1" muon "$rate" 1
done
python docs/measurements/2026-11-23-muon/report.py "$out" --best | while read -r optimizer rate; do
  train "$optimizer-$rate-2" "$optimizer" "$rate" 2
  train "$optimizer-$rate-3" "$optimizer" "$rate" 3
done
python docs/measurements/2026-11-23-muon/report.py "$out" --png docs/measurements/2026-11-23-muon/loss.png
