"""fairseq 0.12.3 for this package: its trainer, and remedies for today's Python, torch and numpy.

:func:`apply` is called when fairseq imports ``smlp.models`` (``--user-dir smlp``) and by the ``smlp`` command.

    trainer           our subclass of fairseq's Trainer, which takes its place; beside it, what its methods rest on:
    experts             gradients, norm and optimizer state of experts that are spread over ranks
    expert_saving       checkpoints whose experts are written by the ranks that have them
    changed_settings    a line where a run goes on with other settings of the model
    divergence          a sentence where numbers are no longer finite
    speed               share of the measured limit, memory and waiting for data, in the training log
    records             --data-order-file and --environment-file: what a run was trained on, and where
    profiling           --profile-updates: a trace and a table of some updates

Each module below holds one group of remedies, every one with its reason; each changes only the names it lists and
leaves every other user of the same library function alone.

    startup     imports that take seconds for nothing, threads beyond the cores, freed memory
    logs        silent tools, warning floods, one-line errors
    versions    names that numpy and torch took away
    parsing     command lines that end in pages of usage or a traceback, --bf16 without a TPU
    limits      numbers that no option can work with
    settings    options that cannot work on this machine, or with experts that are spread over ranks
    needs       options that need what is not there
    stopping    signals that ask a run to save and leave
    processes   torchrun, srun and explicit ranks, with and without a GPU
    lost_ranks  for it: what a rank says that another one has left alone
    saving      checkpoints that are whole or absent, a full disk
    loading     missing, truncated and unfitting checkpoints
    data        missing, empty and unreadable text and datasets
    batches     the samples that fairseq leaves out, batches that only keep the ranks together
    buffering   threads that read batches nobody wants any more
    adam        on a CPU: Adam in one pass
    scoring     samples whose first tokens only choose experts
"""

from __future__ import annotations

_applied = False


def apply() -> None:
    """Put the trainer and all remedies in place in this process; later calls do nothing."""
    global _applied
    if _applied:
        return
    _applied = True

    from smlp.fairseq_compat import (
        adam,
        batches,
        buffering,
        data,
        divergence,
        expert_saving,
        limits,
        loading,
        logs,
        needs,
        parsing,
        processes,
        saving,
        scoring,
        settings,
        speed,
        startup,
        stopping,
        trainer,
        versions,
    )

    remedies = (startup, logs, versions, parsing, limits, needs, settings, stopping, processes, saving, loading, data)
    for group in (*remedies, batches, buffering, adam, scoring, divergence, speed, expert_saving, trainer):
        group.apply()
