# shellcheck shell=bash
# Sourced by the .sbatch files, inside a job, after SMLP_ROOT is set.
#
#   begin_job            environment, folder for the logs
#   recall_arguments     ARGUMENTS of the first start of this job; fails in the first start
#   run_ranks            `smlp train ARGUMENTS` on all tasks; afterwards ends the job or requeues it
#
# SMLP_LOGS           folder of the logs, with a folder for each job; default: slurm-logs in the folder of submission
# SMLP_MAX_RESTARTS   how often a job may restart, default 100; 0 for never

source "$SMLP_ROOT/scripts/slurm/common.sh"

readonly EXIT_STOPPED=75 # smlp train's exit status after a signal: saved, and the same command resumes

say() { printf '%(%F %T)T | %s | %s\n' -1 "$JOB" "$1"; }

begin_job() {
    [ -n "${SLURM_JOB_ID:-}" ] || fail "SLURM_JOB_ID is not set: this script is for a Slurm job, start it with sbatch"
    JOB="$SLURM_JOB_ID"
    [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || JOB="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    RESTARTS="${SLURM_RESTART_COUNT:-0}"
    [[ "$RESTARTS" =~ ^(0|[1-9][0-9]{0,8})$ ]] || fail "SLURM_RESTART_COUNT is '$RESTARTS', not a number"
    MAX_RESTARTS="${SMLP_MAX_RESTARTS:-100}"
    [ -n "${SLURM_NTASKS:-}" ] || fail "SLURM_NTASKS is not set, so the number of ranks is unknown: give sbatch --ntasks-per-node"
    LOGS="${SMLP_LOGS:-$SLURM_SUBMIT_DIR/slurm-logs}/$JOB"
    mkdir -p "$LOGS" || fail "cannot make the folder $LOGS for the logs"
    source "$SMLP_ROOT/scripts/slurm/site.sh"
    unset SLURM_EXPORT_ENV # of sbatch --export=NONE: the ranks need what site.sh sets
    trap : USR1 TERM # these signals are meant for the ranks
}

# A restart runs the same arguments as the first start, even if files have changed since.
recall_arguments() {
    [ "$RESTARTS" -gt 0 ] && [ -s "$LOGS/arguments" ] && mapfile -d '' -t ARGUMENTS <"$LOGS/arguments"
}

run_ranks() {
    local status
    check_arguments
    { printf '%s\0' "${ARGUMENTS[@]}" >"$LOGS/arguments.new" && mv -f "$LOGS/arguments.new" "$LOGS/arguments"; } ||
        fail "cannot write $LOGS/arguments, from which a restart would run"
    rm -f "$LOGS/stopped"
    export PYTHONUNBUFFERED=1
    export SMLP_TRACEBACK="${SMLP_TRACEBACK-1}" # errors that nobody foresaw, whole in the log
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
    # Since Slurm 22.05, srun does not inherit it from the job.
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
    say "start $((RESTARTS + 1)): $SLURM_NTASKS ranks on $SLURM_JOB_NODELIST, logs in $LOGS"
    say "smlp train$(printf ' %q' "${ARGUMENTS[@]}")"
    srun --kill-on-bad-exit=1 --distribution=block --open-mode=append --output="$LOGS/rank-%t.log" \
        bash "$SMLP_ROOT/scripts/slurm/task.sh" "$LOGS/stopped" smlp train "${ARGUMENTS[@]}"
    status=$?
    if [ $status -ne 0 ]; then
        say "training failed with exit status $status: srun names the tasks that failed; the log of task N is $LOGS/rank-N.log"
        exit $status
    elif [ -e "$LOGS/stopped" ]; then
        requeue
    fi
    say "training has ended"
}

# By $JOB: of an array, one task has the number of the array as its SLURM_JOB_ID, and stands for all with that.
state_of_job() { squeue --noheader --jobs="$JOB" --format=%T; }

requeue() {
    local state
    unset "${!SQUEUE_@}" # what the user sees of the queue
    state="$(state_of_job)" || state="$(sleep 2 && state_of_job)" || state="of unknown state (squeue failed twice)"
    if [ "$state" != RUNNING ]; then
        # cancelled, or Slurm requeues it itself
        say "training stopped; the job is ${state:-no longer in the queue}, so this script does not requeue it"
    elif [ "$RESTARTS" -ge "$MAX_RESTARTS" ]; then
        say "training stopped; the job has restarted $RESTARTS times and SMLP_MAX_RESTARTS allows no more: submit it again to resume"
    else
        say "training stopped; the job returns to the queue and resumes later" # before Slurm ends this script
        scontrol requeue "$JOB" && exit 0
        say "scontrol could not requeue the job: submit it again to resume"
    fi
    exit $EXIT_STOPPED
}
