"""Remedies for fairseq 0.12.3 on today's Python, torch and numpy.

:func:`apply` is called when fairseq imports ``smlp.models`` (``--user-dir smlp``) and by the ``smlp`` command. Each
module below holds one group of remedies, every one with its reason; each changes only the names it lists and leaves
every other user of the same library function alone.

    startup     imports that take seconds for nothing, threads beyond the cores
    logs        silent tools, warning floods, one-line errors
    versions    names that numpy and torch took away
    parsing     command lines that end in pages of usage or a traceback, --bf16 without a TPU
    limits      numbers that no option can work with
    needs       options that need what is not there
    precision   --fp16 without a GPU
    stopping    signals that ask a run to save and leave
    processes   torchrun, srun and explicit ranks, with and without a GPU
    lost_ranks  for it: what a rank says that another one has left alone
    saving      checkpoints that are whole or absent, a full disk
    loading     missing, truncated and unfitting checkpoints
    data        missing, empty and unreadable text and datasets
    batches     the samples that fairseq leaves out
    buffering   threads that read batches nobody wants any more
    scoring     samples whose first tokens only choose experts
"""

from __future__ import annotations

_applied = False


def apply() -> None:
    """Put all remedies in place in this process; later calls do nothing."""
    global _applied
    if _applied:
        return
    _applied = True

    from smlp.fairseq_compat import (
        batches,
        buffering,
        data,
        limits,
        loading,
        logs,
        needs,
        parsing,
        precision,
        processes,
        saving,
        scoring,
        startup,
        stopping,
        versions,
    )

    # stopping before processes, which settles the ranks that it looks at
    first = (startup, logs, versions, parsing, limits, needs, precision, stopping, processes)
    for group in (*first, saving, loading, data, batches, buffering, scoring):
        group.apply()
