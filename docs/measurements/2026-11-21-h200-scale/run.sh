#!/usr/bin/env bash
# Whole steps of four layouts on four H200 of one host, about seven minutes.
#   docs/measurements/2026-11-21-h200-scale/run.sh OUTPUT_FOLDER
set -uo pipefail
out=$1
export OMP_NUM_THREADS=8 PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD

bench() { # name, then the arguments of bench_step
    local name=$1
    shift
    torchrun --standalone --nproc-per-node 4 -m tools.bench_step --micro-batches 8 --warmup 2 --steps 3 --rounds 1 --json "$out/$name.json" "$@" \
        >"$out/$name.txt" 2>"$out/$name.err" || tail -n 5 "$out/$name.err"
    cat "$out/$name.txt"
}

bench dp4 --config configs/llama3-8b.yaml --layouts "tensor=1 pipeline=1 zero=1" --variants bf16,delayed,delayed+fast
bench tp2-pp2 --config configs/llama3-8b.yaml --layouts "tensor=2 pipeline=2" --variants bf16,delayed,delayed+fast
bench llama3-70b-12-layers --config configs/llama3-70b.yaml --set model.num_layers=12 --layouts "tensor=4 pipeline=1" --variants bf16,delayed,delayed+fast
# Nine blocks' time on each rank: the output layer of the last is as much work as 2.4 blocks.
for layers in "tensor=1 pipeline=4 layers_per_stage=[9,9,8,6]" "tensor=1 pipeline=4 schedule=zb-h1 layers_per_stage=[9,9,8,6]" \
    "tensor=1 pipeline=4 virtual_pipeline=2 schedule=interleaved layers_per_stage=[4,4,4,5,5,4,4,2]" "tensor=1 pipeline=4 virtual_pipeline=2 schedule=zb-v layers_per_stage=[4,4,4,4,4,4,4,4]"; do
    bench "pp4-$RANDOM" --config configs/llama3-8b.yaml --layouts "$layers" --variants delayed
done
