#!/usr/bin/env bash
# One rank of a Slurm job: bash task.sh NOTE COMMAND...
#
# Exits with the command's status, except after a stop by a signal: then it writes the file NOTE and exits with 0.
# Otherwise srun --kill-on-bad-exit would end the other ranks when the first one stops, and when a rank fails, the signal
# that ends the others could not be distinguished from one that Slurm sends before it takes the nodes away.
note="$1"
shift
trap : USR1 TERM # sent to each process of a task; the command handles them
"$@"
status=$?
case $status in
75 | $((128 + 10)) | $((128 + 15))) # it has saved, or SIGUSR1 or SIGTERM ended it before there was anything to save
    { echo "$status" >"$note"; } && exit 0 # without the note, it would pass for the end of the training
    ;;
esac
exit $status
