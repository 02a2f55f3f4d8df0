"""Start training processes and stop them; nothing here needs fairseq, and only ``plan`` and ``team`` need torch.

ranks         which rank this process is, from the variables of torchrun or srun
slurm         what Slurm's variables say
machine       cores and memory that this process may use, and how its threads wait
local         N ranks on this machine, ended together; a free port for them; the command that starts this package
team          ranks that share work, each with the whole model
plan          where every rank would run, without starting any
environment   versions, machine, revision and plug-ins, for the record
stop_signals  SIGUSR1, SIGTERM and SIGHUP as a request to save and leave
"""
