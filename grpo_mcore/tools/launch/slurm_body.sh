# ----------------------------------------------------------------------------------------------------------------------
# Starts a Ray head on the first node and a Ray node on each of the others, all by srun; then the command on the first
# node. When any of them ends, the job ends. Nothing here needs Python outside the container.

set -uo pipefail
CONTAINER=${CONTAINER:-} # image for pyxis; empty: bare metal
MOUNTS=${MOUNTS:-}       # FROM:TO[:ro],... for the container
RESTARTS=${RESTARTS:-3}  # how often a run that ran out of time or lost something is queued again; preemptions do not count
LOGS=${LOGS:-logs/slurm} # on the shared file system
PYTHON=${PYTHON:-python}
START_TIMEOUT=${START_TIMEOUT:-600} # seconds until all nodes must have joined Ray
STAGE_TO=${STAGE_TO:-}              # folder of a node's own disk, for copies of the models
restart=${SLURM_RESTART_COUNT:-0}
say() { echo "[$(date +%H:%M:%S)] $*"; }
if [[ ${SLURM_EXPORT_ENV:-} == NONE ]]; then
    say "this job has no variable of the shell that submitted, not even PATH: unset SBATCH_EXPORT there, or no --export"
fi

export RAY_USAGE_STATS_ENABLED=0 RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1
export RAY_memory_monitor_refresh_ms=0 # Ray's memory monitor kills workers that hold a model
ulimit -Sn "$(ulimit -Hn)" 2>/dev/null || true

# Requests of an interactive job in which the shell that submitted was: Slurm hands them on, and srun would repeat them
# beside those of this job. A step has the memory and the GPUs of its job without them.
unset "${!SLURM_MEM_PER_@}" "${!SLURM_GPUS_PER_@}" "${!SLURM_CPU_BIND@}" SLURM_GPUS SLURM_CPUS_PER_GPU SLURM_TRES_PER_TASK \
    SLURM_NTASKS_PER_GPU SLURM_NTASKS_PER_TRES

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
gpus=${SLURM_GPUS_ON_NODE:-0}
logs=$(realpath -m "$LOGS")/$SLURM_JOB_ID-$restart
mkdir -p "$logs" || { say "no folder for logs; set LOGS to one on the shared file system that you may write"; exit 1; }
if [[ -n $(type -t resolved_recipe) ]]; then # as it was when the job was submitted
    export RECIPE=$logs/recipe.yaml
    resolved_recipe >"$RECIPE"
fi
used_up=$(realpath -m "$LOGS")/$SLURM_JOB_ID.restarts # how many of RESTARTS; those by Slurm itself do not count
((restart)) || rm -f "$used_up" # of an older job with this number
used=$(cat "$used_up" 2>/dev/null || echo 0)

# Ray answers only to holders of this job's token. A previous start whose node was lost has left its token behind.
rm -f "$(realpath -m "$LOGS")/$SLURM_JOB_ID"-*/token
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$logs/token
(umask 077 && head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")

# Each job has ten ports, below those that the kernel gives to outgoing connections and above Ray's own range.
port=${RAY_PORT:-$((30000 + SLURM_JOB_ID % 270 * 10))}

inside=()
if [[ -n $CONTAINER ]]; then
    if [[ $logs == *[,:]* ]]; then
        say "a container cannot see $logs: pyxis separates mounts by commas and colons; set LOGS to another folder"
        exit 1
    fi
    inside=(--container-image="$CONTAINER" --container-name="grpo-$SLURM_JOB_ID"
        --container-mounts="$logs:$logs${MOUNTS:+,$MOUNTS}" --container-workdir="$PWD" --no-container-mount-home)
fi
# Without -c a step has all cores of its node, with it only so many: -c means --exact.
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
on_head=(srun --overlap --export=ALL --nodes=1 --ntasks=1 --nodelist="$head")

# The first address that others can reach: a server's BMC may have a network of its own, 169.254.x.x.
head_ip=${HEAD_IP:-$("${on_head[@]}" hostname -I | tr ' ' '\n' | grep -v -m 1 '^169\.254\.')}
if [[ -z $head_ip ]]; then
    say "no address of $head found; set HEAD_IP"
    exit 1
fi
address=$head_ip:$port
[[ $head_ip != *:* ]] || address="[$head_ip]:$port" # IPv6

stage="" # a node's copy of the models, before its Ray starts
if [[ -n $STAGE_TO ]]; then
    if [[ -z ${RECIPE:-} ]]; then
        say "STAGE_TO needs RECIPE, the recipe whose models are copied"
        exit 1
    fi
    stage="$PYTHON -P -m grpo_mcore.cli.main prefetch $(printf %q "$RECIPE") --stage '$STAGE_TO' || exit 1; export HF_HUB_CACHE='$STAGE_TO/hub'; "
fi
node="exec >$(printf %q "$logs")/ray-\$SLURMD_NODENAME.log 2>&1; ${stage}exec $PYTHON -P -m grpo_mcore.cluster.ray_node \$0 \
--address=$address --index=\$SLURM_NODEID --cpus=\${SLURM_CPUS_ON_NODE:-1} --gpus=$gpus --within=$START_TIMEOUT \
--object-store-gb=${OBJECT_STORE_GB:-0}"

# ---- shutdown --------------------------------------------------------------------------------------------------------
head_pid="" workers_pid="" driver_pid=""
gone() { [[ -z $1 ]] || ! kill -0 "$1" 2>/dev/null; }
end() { # PID SIGNAL SECONDS: send the signal and wait. SIGTERM makes srun kill its step; it forwards other signals.
    gone "$1" && return
    [[ $2 == none ]] || kill "-$2" "$1" 2>/dev/null
    for _ in $(seq $(($3 * 5))); do gone "$1" && return; sleep 0.2; done
    kill -TERM "$1" 2>/dev/null
    for _ in $(seq 50); do gone "$1" && return; sleep 0.2; done
    kill -KILL "$1" 2>/dev/null
}
finish() { # SECONDS that the run gets to end by itself; fewer if Slurm ends the job meanwhile
    trap '' USR1
    end "$driver_pid" none "${1:-0}"
    end "$workers_pid" USR2 15
    end "$head_pid" USR2 15
    rm -rf "$RAY_AUTH_TOKEN_PATH"
    trap '' TERM # scontrol requeue sends it
}
on_usr1() {
    if [[ -z $driver_pid ]]; then
        say "Slurm: the time limit is near, and the run has not begun"
        finish
        exit 1
    fi
    say "Slurm: the time limit is near; the run finishes its step and saves"
    kill -USR1 "$driver_pid" 2>/dev/null
}
on_term() {
    trap '' USR1 TERM
    say "Slurm: the job is cancelled or preempted; a requeued job goes on from its newest checkpoint"
    # Slurm itself ends the steps now; an srun may wait for its step longer than Slurm gives this script.
    for _ in $(seq 25); do gone "$driver_pid" && gone "$workers_pid" && gone "$head_pid" && break; sleep 0.2; done
    for pid in $driver_pid $workers_pid $head_pid; do kill -KILL "$pid" 2>/dev/null; done
    rm -rf "$RAY_AUTH_TOKEN_PATH"
    say "everything has ended"
    exit 143
}
trap on_usr1 USR1
trap on_term TERM

# ---- Ray -------------------------------------------------------------------------------------------------------------
say "job $SLURM_JOB_ID, start $((restart + 1)): ${#nodes[@]} nodes (${nodes[*]}), $gpus GPUs each; logs: $logs"
"${on_head[@]}" "${inside[@]}" bash -c "$node" head 0 &
head_pid=$!
if ((${#nodes[@]} > 1)); then
    others=$((${#nodes[@]} - 1))
    # A step numbers its nodes from 0; if several nodes are on one machine, the index must differ from the head's.
    srun --overlap --export=ALL --nodes=$others --ntasks=$others --ntasks-per-node=1 --exclude="$head" \
        "${inside[@]}" bash -c "SLURM_NODEID=\$((SLURM_NODEID + 1)); ${node//\$1/\$SLURM_NODEID}" worker 1 &
    workers_pid=$!
fi
for _ in $(seq "$START_TIMEOUT"); do # until the head answers: the program that waits runs in its container
    (exec 3<>"/dev/tcp/$head_ip/$port") 2>/dev/null && break
    gone "$head_pid" && break
    sleep 1
done
"${on_head[@]}" "${inside[@]}" $PYTHON -P -m grpo_mcore.cluster.ray_node wait --address="$address" \
    --nodes=${#nodes[@]} --gpus=$((gpus * ${#nodes[@]})) --within="$START_TIMEOUT" >"$logs/ready.log" 2>&1 &
ready_pid=$!
ended="this node of Ray ended by itself"
fallen() { gone "$head_pid" || { [[ -n $workers_pid ]] && gone "$workers_pid"; } || grep -qs "$ended" "$logs"/ray-*.log; }
while ! gone "$ready_pid" && ! fallen; do sleep 0.5; done # without a node that has ended, the others would wait for long
gone "$ready_pid" || kill "$ready_pid"
if ! wait "$ready_pid"; then
    say "Ray did not come together:"
    tail -n 20 "$logs/ready.log" "$logs"/ray-*.log 2>/dev/null
    finish
    exit 1
fi
say "Ray is ready: $(tail -n 1 "$logs/ready.log")"

# ---- the run ---------------------------------------------------------------------------------------------------------
say "$COMMAND${CODE:+ (code: $CODE)}"
# The shell around the command survives SIGUSR1, the signal to save; Python has its own handler.
"${on_head[@]}" "${inside[@]}" --export="ALL,RAY_ADDRESS=$address${STAGE_TO:+,HF_HUB_CACHE=$STAGE_TO/hub}" bash -c "trap : USR1; $COMMAND" &
driver_pid=$!
until gone "$driver_pid" || gone "$head_pid" || { [[ -n $workers_pid ]] && gone "$workers_pid"; }; do
    sleep 1 &
    wait $! # a trap interrupts wait at once
done

if gone "$driver_pid"; then
    wait "$driver_pid"
    code=$?
else
    say "a Ray node ended before the run; its log:"
    tail -n 15 "$logs"/ray-*.log
    code=69
fi
bad=""
find_bad() { # nodes whose Ray ended by itself; where the head did, the others only followed it
    for log in "$logs/ray-$head.log" "$logs"/ray-*.log; do
        if grep -qs "$ended" "$log"; then
            node_name=${log##*/ray-}
            bad=${bad:+$bad,}${node_name%.log}
            [[ ${node_name%.log} == "$head" ]] && break
        fi
    done
    [[ -n $bad ]]
}
for _ in $(seq 30); do # a node that hangs ends up to 15 seconds after Ray's head has given it up
    find_bad && say "Ray ended by itself on $bad" && break
    ((code == 69)) || break
    sleep 0.5
done
finish 60
queue_again() { # WHAT: exclude the bad nodes, unless that leaves too few
    if ((used >= RESTARTS)); then
        say "$1; there were $RESTARTS restarts already: submit again to go on"
        return
    fi
    echo $((used + 1)) >"$used_up"
    say "$1; the job is queued again (restart $((used + 1)) of $RESTARTS)${bad:+, without $bad}"
    for wait in 5 20 60 stop; do # a controller that is busy, or a job that must not be queued again (--no-requeue)
        scontrol requeue "$SLURM_JOB_ID" && break
        [[ $wait == stop ]] && say "Slurm does not queue it again: submit again to go on" && return
        sleep "$wait"
    done
    for _ in $(seq 20); do # only a job that waits takes it
        [[ -z $bad ]] || scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$bad" 2>/dev/null && break
        sleep 0.5
    done
    exit 0
}
case $code in
0) say "the run is over" ;;
75) queue_again "saved" ;;
69 | 134 | 137 | 139) # a loss; the driver was killed or crashed
    queue_again "the run lost a process or a node (exit code $code)"
    ;;
*) say "the run failed with exit code $code" ;;
esac
exit "$code"
