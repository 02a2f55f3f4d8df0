#!/usr/bin/env bash
# One rank in a job of Slurm: bash task.sh NOTE COMMAND...
#
# Ends as the command does, but for a stop that a signal asked for: then it writes the file NOTE and ends with status 0.
# Of several ranks, srun --kill-on-bad-exit would end the others when the first one stops, and when one fails, the
# signal that ends the others could not be told from one that Slurm sends before it takes the nodes away.
note="$1"
shift
trap : USR1 TERM # sent to each process of a task; the command decides what to do
"$@"
status=$?
case $status in
75 | $((128 + 10)) | $((128 + 15))) # it has saved; or SIGUSR1 or SIGTERM ended it before there was anything to save
    echo "$status" >"$note"
    exit 0
    ;;
esac
exit $status
