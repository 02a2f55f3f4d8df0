"""Environment variables as Slurm 22.05 sets them, written down from real jobs."""

from __future__ import annotations

_JOB = {"SLURM_JOB_ID": "71", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODELIST": "n[1-2]"}

#: a batch script of two nodes with two tasks each, which is one process
BATCH_SCRIPT = {
    **_JOB,
    **{"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NNODES": "2"},
    **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"},
}

#: a plain srun in that script, its last task
LAST_TASK = {
    **BATCH_SCRIPT,
    **{"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_GTIDS": "2,3"},
    **{"SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_NODES": "2"},
    **{"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_DISTRIBUTION": "block"},
}

#: srun -n1 in that script
ONE_TASK = {
    **BATCH_SCRIPT,
    **{"SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1", "SLURM_STEP_ID": "1", "SLURM_STEPID": "1"},
    **{"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"},
    **{"SLURM_STEP_TASKS_PER_NODE": "1"},
}

#: the shell of salloc -n3 -N2, where the cluster gives it a step
INTERACTIVE_STEP = {
    **_JOB,
    **{"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "44793"},
    **{"SLURM_STEP_ID": "4294967290", "SLURM_STEPID": "4294967290", "SLURM_STEP_NODELIST": "n1"},
    **{"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
}

#: the shell of salloc -n3, where it does not
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "3"}
