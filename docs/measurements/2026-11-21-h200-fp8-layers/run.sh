#!/usr/bin/env bash
# Four Llama-3-8B layers in every way, the floor under the same load, bursts, casts: one H200, about five minutes.
#   docs/measurements/2026-11-21-h200-fp8-layers/run.sh OUTPUT_FOLDER
set -uo pipefail
out=$1
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD OMP_NUM_THREADS=8
ours=megafp8:bf16,megafp8:delayed,megafp8:delayed+fast,megafp8:current,megafp8:rowwise,megafp8:blockwise
layers() { # seconds name options...
    local seconds=$1 name=$2
    shift 2
    timeout "$seconds" python3 -m tools.bench_layer "$@" --json "$out/$name.json" >"$out/$name.txt" 2>"$out/$name.err"
    grep "compiled\|megafp8:\|torchao:\|eager\|WRONG\|busy" "$out/$name.txt" | cut -c1-112
}
layers 100 sustained --variants eager,compiled,$ours,torchao:tensorwise,torchao:rowwise --rounds 3 --steps 6
alone=megafp8:delayed+alone,megafp8:delayed+fast+alone,megafp8:blockwise+alone
layers 60 floor --variants compiled,megafp8:delayed,megafp8:delayed+fast,megafp8:blockwise,$alone --rounds 3 --steps 6 --profile megafp8:delayed,megafp8:blockwise
layers 70 bursts --variants compiled,$ours --rounds 5 --steps 2 --rest 1
layers 45 eight-micro-batches --variants compiled,megafp8:delayed,megafp8:delayed+fast,megafp8:current,megafp8:rowwise,megafp8:blockwise --micro-batches 8 --rounds 2 --steps 1
timeout 50 python3 -m tools.bench_casts | tee "$out/casts.txt"
