"""What fairseq forgets of validations that brought nothing when a run resumes.

``--patience`` counts them in the process alone. ``--lr-scheduler reduce_lr_on_plateau`` does not save its count either,
and changes the rate at an epoch's end only after that epoch's checkpoint is written.
"""

from __future__ import annotations

import sys
from typing import Any

from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule

PLATEAU = "smlp_plateau"  # key in a checkpoint's extra state


def plateau_of(trainer: Any) -> dict[str, Any]:
    """Return what a checkpoint keeps of the validations so far."""
    found: dict[str, Any] = {}
    if hasattr(stopping := _stopping(), "best"):
        found |= {"best": float(stopping.best), "num_runs": stopping.num_runs}
    if (schedule := _schedule(trainer)) is not None:
        found["num_bad_epochs"] = schedule.lr_scheduler.num_bad_epochs
    return found


def restore_plateau(trainer: Any, extra_state: dict[str, Any], reset_lr_scheduler: bool, reset_meters: bool) -> None:
    """Resume from what :func:`plateau_of` found; nothing is known of checkpoints of older revisions."""
    found = extra_state.get(PLATEAU, {})
    if "num_runs" in found and not reset_meters:
        stopping = _stopping()
        stopping.best, stopping.num_runs = found["best"], found["num_runs"]
    schedule = _schedule(trainer)
    if schedule is None or "num_bad_epochs" not in found or reset_lr_scheduler:
        return
    schedule.lr_scheduler.num_bad_epochs = found["num_bad_epochs"]
    batches = extra_state["train_iterator"]
    if batches["iterations_in_epoch"] == 0 and extra_state["val_loss"] is not None:
        trainer.lr_step(batches["epoch"] - 1, extra_state["val_loss"])


def has_lost_patience(patience: int) -> bool:
    """Return whether so many validations in a row, those of a loaded checkpoint, were no better than one before."""
    return 0 < patience <= getattr(_stopping(), "num_runs", 0)


def _stopping() -> Any:
    """Return the function that has ``--patience``'s count as attributes, of the module that runs the training."""
    modules = [sys.modules[name] for name in ("__main__", "fairseq_cli.train") if name in sys.modules]
    return next((module.should_stop_early for module in modules if hasattr(module, "should_stop_early")), None)


def _schedule(trainer: Any) -> ReduceLROnPlateauLRSchedule | None:
    schedule = trainer.lr_scheduler
    return schedule if isinstance(schedule, ReduceLROnPlateauLRSchedule) else None
