#!/usr/bin/env bash
# Whole steps of the layouts in README.md on four H200 of one host, about twenty minutes.
#   docs/measurements/2026-11-21-h200-scale/run.sh OUTPUT_FOLDER
set -uo pipefail
out=$1
export OMP_NUM_THREADS=8 PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD

bench() { # name, then the arguments of bench_step
    local name=$1
    shift
    torchrun --standalone --nproc-per-node 4 -m tools.bench_step --micro-batches 8 --warmup 2 --steps 4 --rounds 1 --json "$out/$name.json" \
        --traces "$out/$name" "$@" >"$out/$name.txt" 2>"$out/$name.err" || tail -n 5 "$out/$name.err"
    cat "$out/$name.txt"
}

bench dp4 --config configs/llama3-8b.yaml --layouts "tensor=1 pipeline=1 zero=1" --variants bf16,delayed,delayed+fast
bench dp4-fp8-state --config configs/llama3-8b.yaml --variants delayed+fast --layouts "tensor=1 pipeline=1 zero=1" \
    "tensor=1 pipeline=1 zero=1 optimizer.reduce_dtype=fp8" "tensor=1 pipeline=1 zero=1 optimizer.moments_dtype=fp8"
bench param-gather --config configs/llama3-8b.yaml --layouts "tensor=1 pipeline=1 zero=1 fp8.param_gather=true" --variants delayed+fast
bench fsdp --config configs/llama3-8b.yaml --variants delayed+fast --layouts "tensor=1 pipeline=1 fsdp=true" "tensor=1 pipeline=1 fsdp=true fp8.param_gather=true"
bench llama3-70b-12-layers --config configs/llama3-70b.yaml --set model.num_layers=12 --layouts "tensor=4 pipeline=1" --variants bf16,delayed,delayed+fast
# The output layer is as much work as 2.4 blocks, so its stage has fewer of them.
bench tp2-pp2 --config configs/llama3-8b.yaml --variants bf16,delayed+fast --layouts "tensor=2 pipeline=2 layers_per_stage=[17,15]" \
    "tensor=2 pipeline=2 virtual_pipeline=2 schedule=interleaved layers_per_stage=[9,9,8,6]" "tensor=2 pipeline=2 schedule=zb-h1 layers_per_stage=[17,15]" \
    "tensor=2 pipeline=2 virtual_pipeline=2 schedule=zb-v layers_per_stage=[9,9,8,6]"
bench pp4 --config configs/llama3-8b.yaml --variants delayed+fast --layouts "tensor=1 pipeline=4" \
    "tensor=1 pipeline=4 virtual_pipeline=2 schedule=interleaved layers_per_stage=[4,4,4,4,5,5,4,2]" "tensor=1 pipeline=4 schedule=zb-h1" \
    "tensor=1 pipeline=4 virtual_pipeline=2 schedule=zb-v"
bench plain --config configs/llama3-8b.yaml --set model.num_layers=8 --layouts "tensor=1 pipeline=1 zero=1" --variants bf16,delayed
bench deterministic --config configs/llama3-8b.yaml --set model.num_layers=8 --layouts "tensor=1 pipeline=1 zero=1" --variants bf16+deterministic,delayed+deterministic
bench context --config configs/llama3-8b.yaml --variants delayed --micro-batches 1 --steps 2 --layouts "tensor=2 pipeline=1 context=2 zero=1" \
    --set training.seq_length=131072 "model.rope_scaling={factor: 8.0}" parallel.recompute=full
torchrun --standalone --nproc-per-node 4 -m tools.bench_overlap --shapes llama3-70b >"$out/overlap-llama3-70b.txt"
torchrun --standalone --nproc-per-node 2 -m tools.bench_overlap --shapes llama3-8b >"$out/overlap-llama3-8b.txt"
