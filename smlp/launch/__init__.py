"""Starting training processes and stopping them; nothing here needs fairseq, and only ``plan`` needs torch.

ranks         which rank this process is, from the variables of torchrun or srun
slurm         what Slurm's variables say
machine       cores and memory that this process may use, and how its threads wait
local         N ranks on this machine, ended together
plan          where every rank would run, without starting any
program       the command that starts this package again
stop_signals  SIGUSR1 and SIGTERM as a wish to save and leave
"""
