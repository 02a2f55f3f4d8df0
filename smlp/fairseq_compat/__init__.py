"""fairseq 0.12.3 for this package: its trainer, and remedies for today's Python, torch and numpy.

:func:`apply` is called when fairseq imports ``smlp.models``: with ``--user-dir smlp``, or through ``command_line``,
with which the ``smlp`` command runs fairseq's tools.

    trainer           our subclass of fairseq's Trainer, which replaces it; its methods rest on:
    experts             gradients, norm and optimizer state of experts that are spread over ranks
    expert_saving       checkpoints whose experts are written by the ranks that have them
    changed_settings    a warning if training resumes with other settings of the model
    divergence          one sentence if numbers are no longer finite
    speed               MFU, memory and waiting for data in the training log
    records             --data-order-file, --update-times-file and --environment-file
    profiling           --profile-updates: a trace and a table of some updates
    plateaus            validations without an improvement, counted on when a run resumes

Each module below holds one group of remedies with their reasons. It changes only the names that it lists, most of them
by ``replacing``, and leaves every other user of the same library function alone.

    startup     imports that take seconds for nothing, threads beyond the cores, freed memory
    logs        silent tools, floods of warnings, errors in one line
    versions    names that numpy and torch removed
    parsing     command lines that end in pages of usage or a traceback, --bf16 without a TPU
    limits      numbers that no option can work with
    needs       options that need something missing
    settings    options that cannot work on this machine, or with experts that are spread over ranks
    stopping    signals that ask a run to save and exit
    processes   torchrun, srun and explicit ranks, with and without a GPU
    lost_ranks  for processes: the message of a rank that waits for a lost one
    saving      checkpoints that are whole or absent, a full disk
    loading     missing, truncated and unfitting checkpoints
    data        missing, empty and unreadable text and datasets
    batches     the samples that fairseq leaves out, batches that only keep the ranks together
    buffering   threads and processes that read batches nobody needs any more
    adam        Adam in one pass on a CPU
    scoring     samples whose first tokens only choose experts
    sentences   data and metrics of fine-tuning on GLUE
"""

from __future__ import annotations

import importlib

#: modules of remedies, in the order in which they are put in place
_IN_ORDER = (
    *("startup", "logs", "versions", "parsing", "limits", "needs", "settings", "stopping", "processes", "saving"),
    *("loading", "data", "batches", "buffering", "adam", "scoring", "sentences", "divergence", "speed"),
    *("expert_saving", "trainer"),
)
_applied = False


def apply() -> None:
    """Put the trainer and all remedies in place in this process; later calls do nothing."""
    global _applied
    if _applied:
        return
    _applied = True

    modules = [importlib.import_module(f"smlp.fairseq_compat.{name}") for name in _IN_ORDER]
    for module in modules:
        module.apply()
