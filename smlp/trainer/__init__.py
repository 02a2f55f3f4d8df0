"""What fairseq's trainer does differently: where experts are spread over ranks, for speed on a CPU, and to see speed.

spread      which parameters are of experts, and where they live
gradients   expert gradients, the norm of all gradients
updates     random numbers, batches that only keep ranks together, running out of memory
settings    options that cannot work with spread experts
saving      checkpoints whose experts are written by the ranks that have them
loading     any checkpoint on any layout
changed_settings  a line where a run goes on with other settings of the model
memory      on a CPU: freed memory is kept
adam        on a CPU: Adam in one pass
divergence  a sentence where numbers are no longer finite
speed       share of the measured limit, and memory, in the training log
data_wait   share of the time that is spent in waiting for batches, in the training log
data_order  --data-order-file: which tokens each update was trained on
environment_file  --environment-file: versions, machine and revision of each start
profiling   --profile-updates: a trace and a table of some updates
"""

from __future__ import annotations

_applied = False


def apply() -> None:
    """Put everything in place in this process; later calls do nothing."""
    global _applied
    if _applied:
        return
    _applied = True

    from smlp.trainer import (
        adam,
        changed_settings,
        data_order,
        data_wait,
        divergence,
        environment_file,
        gradients,
        loading,
        memory,
        profiling,
        saving,
        settings,
        speed,
        updates,
    )

    # speed after updates, whose empty batches it leaves out; profiling and what counts the time between updates last,
    # around all that an update does
    first = (settings, gradients, updates, divergence, saving, loading, changed_settings, memory, adam, speed)
    for group in (*first, data_order, environment_file, profiling, data_wait):
        group.apply()
