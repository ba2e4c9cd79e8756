#!/usr/bin/env bash
# Two agents of one GPU each that NCCL takes for different hosts (NCCL_HOSTID): a pipeline across, one rank killed.
#   docs/measurements/2026-11-22-h200-replica-check/two_agents.sh OUTPUT_FOLDER [killed]     # the second run alone
set -uo pipefail
out=$1 work=$(mktemp -d) port=29512
python3 docs/measurements/random_documents.py "$work/data" 4000
keys=(
    "data.train=[$work/data]" data.tokenizer='{kind: bytes}' data.index_cache="$work/cache" run_dir="$work" model.vocab_size=512
    model.num_layers=8 model.hidden_size=1024 model.num_attention_heads=8 model.num_query_groups=4 model.ffn_hidden_size=2816
    training.seq_length=1024 training.micro_batch_size=2 training.global_batch_size=16 training.steps=300 training.eval_interval=0
    training.precision=bf16 checkpoint.interval=50 parallel.tensor=1 parallel.pipeline=2 logging.interval=50 logging.tensorboard=false
)
node() { # number, name of the run, log
    CUDA_VISIBLE_DEVICES=$1 NCCL_HOSTID=node$1 NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH NNODES=2 HEAD_NODE=localhost HEAD_PORT=$port RDZV_ID=$2 NPROC_PER_NODE=1 \
        launch/multi_node.sh configs/quickstart.yaml name="$2" "${keys[@]}" >"$out/$2-node$1.log" 2>&1
}
curve() { python3 -c 'import json, sys; print([round(json.loads(l)["loss"], 4) for l in open(sys.argv[1])][-1], sum(1 for l in open(sys.argv[1])))' "$work/$1/metrics.jsonl"; }
[[ ${2:-} == killed ]] || {
    start=$SECONDS
    node 0 whole & node 1 whole & wait
    echo "whole run: $((SECONDS - start)) s; last loss, lines: $(curve whole)"
}
start=$SECONDS
node 0 killed & first=$!
node 1 killed & second=$!
for _ in $(seq 120); do [[ -d $work/killed/checkpoints/step_00000100 ]] && break; sleep 0.5; done
pkill -9 -f "name=killed.*" -n # the newest process: a rank
killed=$SECONDS
wait $first; one=$?
wait $second; two=$?
echo "killed after $((killed - start)) s, done after $((SECONDS - start)) s, exit codes $one $two; last loss, lines: $(curve killed)"
grep -hE "via NET|Using network|was ended by|restarting|resumed from step" "$out"/killed-node*.log | sed 's/^.*NCCL INFO //' | sort | uniq -c | sort -rn | head -12
