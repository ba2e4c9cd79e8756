#!/usr/bin/env bash
# Two agents of one GPU each that NCCL takes for different hosts (NCCL_HOSTID), against one host with both GPUs.
#   [STEPS=120] [GRAPHS=auto] [LAYOUTS="pipeline data fsdp"] docs/measurements/2026-11-22-graphs/two_agents.sh OUTPUT_FOLDER
# Prints the last loss of each run and whether all losses are those of one host; then an agent is killed and started again.
set -uo pipefail
out=$1 work=$(mktemp -d) port=29512 steps=${STEPS:-120}
python3 docs/measurements/random_documents.py "$work/data" 2000
keys=(
    "data.train=[$work/data]" data.tokenizer='{kind: bytes}' data.index_cache="$work/cache" run_dir="$work" model.vocab_size=512
    model.num_layers=8 model.hidden_size=1024 model.num_attention_heads=8 model.num_query_groups=4 model.ffn_hidden_size=2816
    training.seq_length=1024 training.micro_batch_size=1 training.global_batch_size=8 training.steps=$steps training.eval_interval=0
    training.precision=bf16 fp8.recipe=delayed checkpoint.interval=$((steps / 3)) logging.interval=$((steps / 3)) logging.tensorboard=false
    logging.progress=false deterministic=true fp8.gemm_autotune=false training.cuda_graphs=${GRAPHS:-auto}
)
declare -A layouts=(
    [pipeline]="parallel.tensor=1 parallel.pipeline=2 parallel.schedule=zb-h1"
    [data]="parallel.tensor=1 parallel.pipeline=1 parallel.zero=1"
    [fsdp]="parallel.tensor=1 parallel.pipeline=1 parallel.fsdp=true fp8.param_gather=true"
)
one_host() { # layout, name of the run
    NPROC_PER_NODE=2 launch/single_node.sh configs/quickstart.yaml name="$2" "${keys[@]}" ${layouts[$1]} >"$out/$2.log" 2>&1
}
node() { # number, layout, name of the run
    CUDA_VISIBLE_DEVICES=$1 NCCL_HOSTID=node$1 NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH NNODES=2 HEAD_NODE=localhost HEAD_PORT=$port RDZV_ID=$3 NPROC_PER_NODE=1 \
        launch/multi_node.sh configs/quickstart.yaml name="$3" "${keys[@]}" ${layouts[$2]} >>"$out/$3-node$1.log" 2>&1
}
compare() { # runs, the first of one host
    python3 - "$work" "$@" <<'PY'
import json, sys
work, *names = sys.argv[1:]
curves = []
for name in names:
    steps = {}
    for line in open(f"{work}/{name}/metrics.jsonl"):
        record = json.loads(line)
        steps[record["step"]] = (record["loss"], record["grad_norm"])
    curves.append(steps)
    last = max(steps)
    print(f"{name}: {last} steps, last loss {steps[last][0]:.6f}, {'the same curve' if steps == curves[0] else 'another curve'}")
PY
}
for layout in ${LAYOUTS:-pipeline data fsdp}; do
    start=$SECONDS
    one_host "$layout" "$layout-one"
    echo "$layout on one host: $((SECONDS - start)) s"
    start=$SECONDS
    node 0 "$layout" "$layout-two" & node 1 "$layout" "$layout-two" & wait
    echo "$layout over two agents: $((SECONDS - start)) s"
    compare "$layout-one" "$layout-two"
done
start=$SECONDS
node 0 pipeline killed & first=$!
node 1 pipeline killed &
for _ in $(seq 240); do [[ -d $(printf "$work/killed/checkpoints/step_%08d" $((steps / 3))) ]] && break; sleep 0.25; done
agent=$(pgrep -n -f "launch.agent.*name=killed") # the newest: node 1's
ranks=$(pgrep -P "$agent")
kill -9 "$agent" $ranks
killed=$SECONDS
node 1 pipeline killed & second=$!
wait $first; one=$?
wait $second; two=$?
echo "agent killed after $((killed - start)) s and started again, done after $((SECONDS - start)) s, exit codes $one $two"
compare pipeline-one killed
grep -hE "via NET|Using network|CUDA graphs|gathered by|overlap|resumed from step|restarting" "$out"/*-node*.log | sed 's/^.*NCCL INFO //' | sed 's/^[0-9:. -]*//' | sort | uniq -c | sort -rn | head -24
