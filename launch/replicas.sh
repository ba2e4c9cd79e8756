#!/usr/bin/env bash
# Train several replicas of the model on this machine, each a job of its own that may be lost and rejoin while the others
# train (resilience.replicas): starts the lighthouse, and launch/single_node.sh once for each replica.
#
#   REPLICAS=2 launch/replicas.sh CONFIG [section.key=value ...]
#   REPLICAS=4 MIN_REPLICAS=2 launch/replicas.sh configs/llama3-8b.yaml
#
# REPLICAS         number of replicas, which share the GPUs equally; on a machine without GPUs each is one process
# MIN_REPLICAS     fewest replicas that train (1)
# MAX_RESTARTS     restarts of each replica after a failure (3); the others go on meanwhile
# NPROC_PER_NODE   processes of each replica (its GPUs)
# HEARTBEAT_SECONDS  time without a sign of life after which a replica counts as lost (5)
# LOG_DIR          keep what each rank prints, in files below this folder
# MEGAFP8_LIGHTHOUSE        address of the lighthouse (127.0.0.1 and a free port)
# MEGAFP8_LIGHTHOUSE_TOKEN  word of 16 characters or more that its clients must have (random)
#
# Exit codes: 0 a replica has done the last step, or all were stopped cleanly by SIGTERM or Ctrl-C; 2 a fault of config,
# data or checkpoint, which is not restarted and ends all; otherwise that of the first replica that failed for good, once
# all have ended. A replica that failed for good is named while the others go on. docs/launching.md describes all this.
#
# Paths are relative to the folder above this script's.
set -euo pipefail
cd "$(dirname "$0")/.."
usage="usage: REPLICAS=N launch/replicas.sh CONFIG [section.key=value ...]"
[[ $# -ge 1 ]] || { echo "$usage" >&2; exit 2; }
[[ -f $1 ]] || { echo "error: no such config: $1; there are: $(ls ./*.yaml configs/*.yaml 2>/dev/null | xargs)" >&2; exit 2; }
count=${REPLICAS:-} min=${MIN_REPLICAS:-1}
[[ $count =~ ^[1-9][0-9]*$ && $count -ge 2 ]] || { echo "error: REPLICAS is ${count:-not set}; give 2 or more. $usage" >&2; exit 2; }
[[ $min =~ ^[1-9][0-9]*$ && $min -le $count ]] || { echo "error: MIN_REPLICAS is $min; give 1 to $count, the number of replicas" >&2; exit 2; }
config=$1
shift

# The GPUs of each replica: those of CUDA_VISIBLE_DEVICES in equal parts, or else all of the machine.
gpus=()
if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
elif [[ -z ${CUDA_VISIBLE_DEVICES+set} ]]; then
    mapfile -t gpus < <(nvidia-smi --list-gpus 2>/dev/null | sed -n 's/^GPU \([0-9]*\).*/\1/p')
fi
share=$((${#gpus[@]} / count))
if ((share * count != ${#gpus[@]})); then
    echo "error: ${#gpus[@]} GPUs cannot be shared equally by $count replicas; set REPLICAS or CUDA_VISIBLE_DEVICES" >&2
    exit 2
fi

if [[ -z ${MEGAFP8_LIGHTHOUSE:-} ]]; then
    port=$(python -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
    MEGAFP8_LIGHTHOUSE=127.0.0.1:$port
fi
export MEGAFP8_LIGHTHOUSE
# In the environment, not in arguments, which all users of the machine can read.
export MEGAFP8_LIGHTHOUSE_TOKEN=${MEGAFP8_LIGHTHOUSE_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
export MAX_RESTARTS=${MAX_RESTARTS:-3}
export -n REPLICAS MIN_REPLICAS

# Background processes get process groups of their own, so that Ctrl-C reaches this shell alone, which passes it on once.
# Without job control they would ignore it.
set -m

# shellcheck disable=SC2317 # these functions are called by `named`

# Run COMMAND, and again after it was ended by a signal, up to LIMIT times. Signals are passed on to it. Returns its code.
# The agent itself restarts its ranks after other failures.
supervise() { # LIMIT COMMAND ...
    local left=$1 code=0 again process='' signalled=''
    shift
    trap 'stopping=yes signalled=yes; [[ ! $process ]] || kill -TERM "$process" 2>/dev/null || true' TERM
    trap 'stopping=yes signalled=yes; [[ ! $process ]] || kill -INT "$process" 2>/dev/null || true' INT
    set -m
    while [[ ! $stopping ]]; do
        "$@" &
        process=$! code=0
        [[ ! $stopping ]] || kill -TERM "$process" 2>/dev/null || true # it was not there when the signal came
        wait "$process" 2>/dev/null || code=$? # of a killed process the shell would print its command
        while [[ $signalled ]]; do # a signal has ended `wait`
            signalled='' again=0
            wait "$process" 2>/dev/null || again=$?
            ((again == 127)) || code=$again
        done
        if [[ $stopping ]] || ((code <= 128 || left == 0)); then
            break
        fi
        left=$((left - 1))
        echo "ended by signal $((code - 128)); restarting, $left left"
    done
    return "$code"
}

# Run a command with NAME at the begin of all lines that it prints. The reader ends with the last process that writes.
named() { # NAME COMMAND ...
    local code=0 reader stopping=''
    trap 'stopping=yes' TERM INT # until those of `supervise` are there
    exec 3>&1 > >(trap '' TERM INT; exec sed -u "s/^/[$1] /") 2>&1
    reader=$!
    "${@:2}" || code=$?
    exec >&3 2>&3
    wait "$reader" || true
    exit "$code"
}

serve() {
    exec python -m megafp8 lighthouse --bind "$MEGAFP8_LIGHTHOUSE" --min "$min" \
        --heartbeat-seconds "${HEARTBEAT_SECONDS:-5}"
}

train() { # INDEX [section.key=value ...]
    export MEGAFP8_REPLICA=$1
    if ((share > 0)); then
        export CUDA_VISIBLE_DEVICES
        CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${gpus[*]:$1*share:share}")
    fi
    shift
    supervise "$MAX_RESTARTS" \
        launch/single_node.sh "$config" "resilience.replicas.count=$count" "resilience.replicas.min=$min" "$@"
}

named lighthouse supervise 1000 serve &
lighthouse=$!
declare -A running=() # processes, by replica
for ((i = 0; i < count; i++)); do
    named "replica $i" train "$i" "$@" &
    running[$i]=$!
done

stopping=''
stop() { # SIGNAL
    stopping=yes
    [[ ${#running[@]} == 0 ]] || kill "-$1" "${running[@]}" 2>/dev/null || true
}
trap 'stop TERM' TERM
trap 'stop INT' INT

done='' failed=0 outcome=''
while ((${#running[@]} > 0)); do
    for i in "${!running[@]}"; do
        kill -0 "${running[$i]}" 2>/dev/null && continue
        code=0
        wait "${running[$i]}" || code=$?
        unset "running[$i]"
        if ((code == 0)); then
            done=yes
            continue
        fi
        failed=$((failed == 0 ? code : failed))
        echo "replica $i has ended with exit code $code" >&2
        if ((code == 2)); then
            outcome=2
            [[ $stopping ]] || stop TERM # the others would find the same fault, or wait for this replica
        elif [[ ! $stopping && ! $done ]] && ((${#running[@]} < min)); then
            outcome=$code
            echo "error: ${#running[@]} replicas are left, and $min must train" >&2
            stop TERM
        fi
    done
    if ! kill -0 "$lighthouse" 2>/dev/null && [[ ! $stopping ]]; then
        echo "error: the lighthouse has ended; its message is above" >&2
        outcome=2
        stop TERM
    fi
    sleep 0.5 &
    wait $! || true # unlike sleep in the foreground it is ended by a signal at once
done
kill -TERM "$lighthouse" 2>/dev/null || true
wait "$lighthouse" || true
[[ ! $outcome ]] || exit "$outcome"
[[ ! $done ]] || exit 0
exit "$failed"
