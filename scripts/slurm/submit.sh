#!/usr/bin/env bash
# Checks a training run, or a sweep of runs, and submits it to Slurm.
#
#   bash scripts/slurm/submit.sh --nodes 4 --gpus-per-node 8 -- examples/smlp.sh DATA SAVE_DIR [any option of fairseq-train]
#   bash scripts/slurm/submit.sh --nodes 4 --gpus-per-node 8 -- DATA --arch smlp --save-dir SAVE_DIR [...]
#   bash scripts/slurm/submit.sh --nodes 1 --gpus-per-node 8 --sweep scripts/slurm/sweep.txt -- DATA SAVE_ROOT [...]
#
#   --nodes N            machines
#   --gpus-per-node G    GPUs of each machine, one rank on each GPU
#   --tasks-per-node R   instead: R ranks on the CPUs of each machine
#   --sweep LIST         each line of LIST is a run (scripts/slurm/sweep.txt); --array=3,7 for some of them only,
#                        --array=1-10%2 for two at a time
#   --unchecked          submit a long list without the check of each line by smlp train --dry-run (seconds each)
#   --logs DIR           folder of the logs, with a folder for each job; default: slurm-logs
#   --dry-run            submit nothing; print every rank's host, device and experts, and the commands
#   --OPTION=VALUE       any other option of sbatch: --time=8:00:00 --partition=gpu --account=me --gres=gpu:a100:8
#
# Command files keep the tokens of an update on any number of GPUs that divides its batches (examples/recipe.sh).
set -uo pipefail
SMLP_ROOT="$(CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export SMLP_ROOT
source "$SMLP_ROOT/scripts/slurm/common.sh"

NODES="" GPUS_PER_NODE="" TASKS_PER_NODE="" SWEEP="" LOGS="slurm-logs" DRY_RUN="" UNCHECKED=""
SBATCH_OPTIONS=()

read_options() {
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        case "$1" in
        -h | --help)
            sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --dry-run) DRY_RUN=1 ;;
        --unchecked) UNCHECKED=1 ;;
        --nodes | --gpus-per-node | --tasks-per-node | --sweep | --logs | --time | --partition | --account)
            if [ $# -eq 1 ] || [ "$2" = -- ]; then fail "$1 needs a value"; fi
            set_option "$1" "$2"
            shift
            ;;
        --*=*) set_option "${1%%=*}" "${1#*=}" ;;
        *) fail "unknown option '$1': write options of sbatch as --OPTION=VALUE, and what to train after --" ;;
        esac
        shift
    done
    [ $# -gt 0 ] || fail "there is nothing to train: write it after --, for example -- examples/smlp.sh DATA SAVE_DIR"
    WORDS=("${@:2}")
}

set_option() {
    case "$1" in
    --nodes) NODES="$2" ;;
    --gpus-per-node) GPUS_PER_NODE="$2" ;;
    --tasks-per-node | --ntasks-per-node) TASKS_PER_NODE="$2" ;;
    --sweep) SWEEP="$2" ;;
    --logs) LOGS="$2" ;;
    *)
        local whole
        for whole in --array --cpus-per-task --dependency --export --gres --job-name --ntasks-per-node; do
            # sbatch takes the beginning of a name for it
            [[ "$1" == --ntasks || "$whole" != "$1"?* ]] || fail "unknown option '$1': write $whole out"
        done
        SBATCH_OPTIONS+=("$1=$2")
        ;;
    esac
}

has_sbatch_option() { [[ " ${SBATCH_OPTIONS[*]%%=*} " == *" $1 "* ]]; }

set_ranks() {
    [ -n "$SWEEP" ] || ! has_sbatch_option --array || fail "--array would start the same run several times: list runs with --sweep FILE"
    [ -n "$NODES" ] || fail "--nodes, the number of machines, is missing"
    check_number --nodes "$NODES"
    if [ -n "$GPUS_PER_NODE" ]; then
        check_number --gpus-per-node "$GPUS_PER_NODE"
        [ "${TASKS_PER_NODE:-$GPUS_PER_NODE}" = "$GPUS_PER_NODE" ] ||
            fail "--gpus-per-node $GPUS_PER_NODE starts $GPUS_PER_NODE ranks on each node, and --tasks-per-node says $TASKS_PER_NODE: leave the latter out"
        TASKS_PER_NODE="$GPUS_PER_NODE"
        has_sbatch_option --gres || SBATCH_OPTIONS+=("--gres=gpu:$GPUS_PER_NODE")
    else
        [ -n "$TASKS_PER_NODE" ] || fail "--gpus-per-node is missing (to train on CPUs: --tasks-per-node)"
        check_number --tasks-per-node "$TASKS_PER_NODE"
        has_sbatch_option --gres || SBATCH_OPTIONS+=(--gres=none)
        has_sbatch_option --cpus-per-task || SBATCH_OPTIONS+=(--cpus-per-task=1)
    fi
    RANKS=$((NODES * TASKS_PER_NODE))
    SBATCH_OPTIONS=("--nodes=$NODES" "--ntasks-per-node=$TASKS_PER_NODE" "${SBATCH_OPTIONS[@]}")
}

# The job needs SMLP_ROOT and SMLP_LOGS.
check_export() {
    local option export="${SBATCH_EXPORT:-ALL}"
    for option in "${SBATCH_OPTIONS[@]}"; do
        [[ "$option" != --export=* ]] || export="${option#--export=}"
    done
    [[ ",${export^^}," == *,ALL,* ]] || fail "with --export=$export, the job does not get variables that it needs: give --export=ALL"
}

# Report problems with ARGUMENTS now, not after hours in the queue.
check_run() {
    check_arguments
    local data word
    for word in "${ARGUMENTS[@]}"; do
        case "$word" in
        -h | --help | --dry-run) fail "with $word, smlp train trains nothing: leave it out after --" ;;
        esac
    done
    [[ "${ARGUMENTS[0]:-}" != -* ]] || return 0
    data="${ARGUMENTS[0]:-}"
    data="${data%%:*}"
    [ -f "$data/dict.txt" ] || [ -f "$data/input0/dict.txt" ] ||
        fail "there is no dict.txt in '$data': DATA is a folder that fairseq-preprocess or smlp data writes"
    while IFS= read -r data; do # the shards after the first have no dictionary of their own
        [ -d "$data" ] || fail "there is no folder '$data' with data"
    done < <(tr : '\n' <<<"${ARGUMENTS[0]}")
}

rank_table() {
    local given=--gpus-per-node
    [ -n "$GPUS_PER_NODE" ] || given=--tasks-per-node # for smlp train the same, and named so in its messages
    { smlp train --dry-run --nodes "$NODES" --gpus-per-node "$TASKS_PER_NODE" "${ARGUMENTS[@]}" 2>&1 >&3 |
        sed -E "s/^(smlp: error: (--nodes $NODES with )?)--gpus-per-node/\1$given/" >&2; } 3>&1
}

add_cpu() {
    [ -n "$GPUS_PER_NODE" ] || [[ " $* " == *" --cpu "* ]] || echo --cpu
}

plan_run() {
    # shellcheck disable=SC2046  # one word or none
    set_arguments "$RANKS" "${WORDS[@]}" $(add_cpu "${WORDS[@]}")
    local plan save_dir folder
    check_run
    plan="$(rank_table)" || exit 1
    [ -z "$DRY_RUN" ] || echo "$plan"
    save_dir="$(value_of --save-dir checkpoints)"
    # The name identifies the folder: jobs with the same name do not run at the same time, so they cannot overwrite
    # each other's checkpoints.
    folder="$(realpath -m -- "$save_dir")"
    NAME="smlp-$(basename "$folder")-$(cksum <<<"$folder" | cut -d ' ' -f 1)"
    has_sbatch_option --job-name || SBATCH_OPTIONS+=("--job-name=$NAME")
    has_sbatch_option --dependency || SBATCH_OPTIONS+=(--dependency=singleton)
    SBATCH_OPTIONS+=("--output=$LOGS/%j.out")
    JOB_COMMAND=("$SMLP_ROOT/scripts/slurm/train.sbatch" "${ARGUMENTS[@]}")
}

# Tasks without a run would only fail.
check_array() {
    local option array part first last step
    for option in "${SBATCH_OPTIONS[@]}"; do
        [[ "$option" == --array=* ]] || continue
        array="${option#--array=}"
        [[ "$array" =~ ^[0-9]{1,9}(-[0-9]{1,9}(:[0-9]{1,9})?)?(,[0-9]{1,9}(-[0-9]{1,9}(:[0-9]{1,9})?)?)*(%[0-9]+)?$ ]] ||
            fail "$option is no list of runs, such as 3,7 or 1-10%2"
        for part in $(tr ',' ' ' <<<"${array%%%*}"); do
            IFS=':-' read -r first last step <<<"$part"
            first=$((10#$first)) last=$((10#${last:-$first})) step=$((10#${step:-1}))
            [ "$step" -ge 1 ] && [ "$first" -le "$last" ] || fail "$option is no list of runs, such as 3,7 or 1-10%2"
            [ "$first" -ge 1 ] && [ $((first + (last - first) / step * step)) -le "${#RUN_NAMES[@]}" ] ||
                fail "$option: the runs of $SWEEP are numbered from 1 to ${#RUN_NAMES[@]}"
        done
    done
}

plan_sweep() {
    [ ${#WORDS[@]} -ge 2 ] || fail "a sweep needs DATA and the folder for all its runs after --"
    read_sweep "$SWEEP"
    check_array
    local index plan options copy
    mapfile -t options < <(add_cpu "${WORDS[@]}")
    for index in "${!RUN_NAMES[@]}"; do
        set_run_arguments "$RANKS" "$index" "${WORDS[@]}" "${options[@]}"
        check_run
        [ -z "$UNCHECKED" ] || continue
        echo "run $((index + 1)), ${RUN_NAMES[index]}:"
        plan="$(rank_table)" || exit 1
        tail -n 2 <<<"$plan"
    done
    copy="$LOGS/sweep-$(date +%Y%m%d-%H%M%S)-XXXX.txt" # waiting tasks must not see later changes of the list
    [ -n "$DRY_RUN" ] || { copy="$(mktemp "$copy")" && cp "$SWEEP" "$copy"; } || exit 1
    has_sbatch_option --array || SBATCH_OPTIONS+=("--array=1-${#RUN_NAMES[@]}")
    SBATCH_OPTIONS+=("--output=$LOGS/%A_%a.out")
    JOB_COMMAND=("$SMLP_ROOT/scripts/slurm/sweep.sbatch" "$copy" "${WORDS[@]}" "${options[@]}")
}

read_options "$@"
[[ "$LOGS" != -* ]] || LOGS="./$LOGS" # commands would take it for an option
[[ "$SWEEP" != -* ]] || SWEEP="./$SWEEP"
set_ranks
check_export
source "$SMLP_ROOT/scripts/slurm/site.sh"
export SMLP_LOGS
SMLP_LOGS="$(realpath -m "$LOGS")"
[[ "$SMLP_LOGS" != *[%\\]* ]] || fail "the folder of logs $SMLP_LOGS has a % or \\ in its name, which sbatch does not take as it is"
[ -n "$DRY_RUN" ] || mkdir -p "$LOGS" || fail "cannot make the folder $LOGS"
if [ -n "$SWEEP" ]; then
    plan_sweep
else
    plan_run
fi
if [ -n "$DRY_RUN" ]; then
    echo "nothing was submitted; without --dry-run, this command would be run:"
    printf 'sbatch%s\n' "$(printf ' %q' "${SBATCH_OPTIONS[@]}" "${JOB_COMMAND[@]}")"
    exit 0
fi
command -v sbatch >/dev/null || fail "there is no command sbatch here: submit from a login node of the cluster"
answer="$(sbatch --parsable "${SBATCH_OPTIONS[@]}" "${JOB_COMMAND[@]}")" || exit 1
# a site's sbatch may print notices, or leave out --parsable; with --clusters it adds the cluster that has the job
number='([0-9]+)((;| on cluster )([^[:space:];]+))?(;.*)?'
job="$(sed -nE "s/^(Submitted batch job )?$number[[:space:]]*\$/\2\3/p" <<<"$answer" | tail -n 1)"
job="${job/ on cluster /;}"
id="${job%%;*}"
cluster="${job#"$id"}"
scancel="scancel${cluster:+ --clusters=${cluster#;}}"
[ -n "$id" ] || fail "sbatch took the job, but its number is not in: ${answer//$'\n'/ }"
suffix="${SWEEP:+_N}"
echo "job $job: $RANKS ranks on $NODES nodes${SWEEP:+ for each run}"
echo "  log of the training   $LOGS/$id$suffix/rank-0.log"
echo "  log of the job        $LOGS/$id$suffix.out"
echo "  to cancel it          $scancel $id"
echo "  to save and restart   $scancel --signal=USR1 $id"
