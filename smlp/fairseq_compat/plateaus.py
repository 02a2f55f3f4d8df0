"""What fairseq forgets of validations without an improvement, and of annealed rates, when a run resumes.

``--patience`` counts them in the process alone. ``--lr-scheduler reduce_lr_on_plateau`` does not save its count either,
and changes the rate at an epoch's end only after that epoch's checkpoint is written. With ``--force-anneal``,
``polynomial_decay`` starts each epoch from the rate that the one before ended with, which is in no checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from smlp.checkpoint.content import PLATEAU


def plateau_of(trainer: Any) -> dict[str, Any]:
    """Return what a checkpoint keeps of the validations so far, and of the rate."""
    found: dict[str, Any] = {"of": _measured(trainer.cfg)}
    if trainer.cfg.checkpoint.patience > 0 and hasattr(stopping := _stopping(), "best"):
        found |= {"best": float(stopping.best), "num_runs": stopping.num_runs}
    if (schedule := _schedule(trainer)) is not None:
        found["num_bad_epochs"] = schedule.num_bad_epochs
    if (annealing := _annealing(trainer)) is not None:
        found["annealed"] = {"from": float(annealing.lr), "lr": list(annealing.cfg.lr)}
    return found


def restore_plateau(
    trainer: Any,
    state: Mapping[str, Any],
    resets_count: bool,
    resets_schedule: bool,
    overrides: Mapping[str, Any] | None,
) -> None:
    """Resume from what :func:`plateau_of` found; counts, if the metric and the name of the first split are the same.

    Args:
        trainer: that has loaded a checkpoint.
        state: the checkpoint's ``extra_state``; that of an older revision has no such entry.
        resets_count: whether ``--patience`` begins anew.
        resets_schedule: whether the schedule of the rate begins anew.
        overrides: what replaces values of the optimizer. A rate among them stays as it is.
    """
    found = state.get(PLATEAU) or {}
    if (annealed := found.get("annealed")) and not resets_schedule:
        _anneal_on(trainer, annealed, state["train_iterator"])
    if found.get("of") != _measured(trainer.cfg):
        return
    stopping = _stopping()
    counts = trainer.cfg.checkpoint.patience > 0 and not resets_count and {"best", "num_runs"} <= found.keys()
    if counts and stopping is not None:
        stopping.best, stopping.num_runs = found["best"], found["num_runs"]
    schedule = _schedule(trainer)
    if schedule is None or "num_bad_epochs" not in found or resets_schedule:
        return
    schedule.num_bad_epochs = found["num_bad_epochs"]
    batches, loss, rate = state["train_iterator"], state.get("val_loss"), trainer.get_lr()
    if batches["iterations_in_epoch"] == 0 and loss is not None:
        trainer.lr_step(batches["epoch"] - 1, loss)
        if "lr" in (overrides or {}):
            trainer.optimizer.set_lr(rate)


def forget_validations() -> None:
    """Forget the validations of another training in this process, such as the job before in a multirun of hydra."""
    from fairseq import checkpoint_utils

    for function in (checkpoint_utils.save_checkpoint, _stopping()):
        for name in ("best", "num_runs"):
            getattr(function, "__dict__", {}).pop(name, None)


def validations_in_vain() -> int:
    """Return how many of the last validations were no better than one before, as ``--patience`` counts them."""
    return getattr(_stopping(), "num_runs", 0)


def _measured(cfg: Any) -> list[str]:
    """Return what is compared: the metric, whether more is better, and the first split."""
    checkpoint = cfg.checkpoint
    best = "largest" if checkpoint.maximize_best_checkpoint_metric else "smallest"
    return [checkpoint.best_checkpoint_metric, best, cfg.dataset.valid_subset.split(",")[0]]


def _stopping() -> Any:
    """Return the function that has ``--patience``'s count as attributes, of the module that runs the training."""
    modules = map(sys.modules.get, ("__main__", "fairseq_cli.train"))
    return next((module.should_stop_early for module in modules if hasattr(module, "should_stop_early")), None)


def _anneal_on(trainer: Any, found: Mapping[str, Any], batches: Mapping[str, Any]) -> None:
    """Go on from the rate with which the checkpoint's epoch began, unless ``--lr`` is another one now."""
    annealing = _annealing(trainer)
    if annealing is None or batches["epoch"] < annealing.cfg.force_anneal or found["lr"] != list(annealing.cfg.lr):
        return
    annealing.lr = found["from"]
    trainer.lr_step_update()
    next_rate = annealing.get_next_lr

    def rate_of_first_epoch(epoch: int) -> float:
        """Return the rate of the rest of an epoch, which fairseq takes for a new one."""
        annealing.get_next_lr = next_rate
        is_rest = batches["iterations_in_epoch"] and epoch == batches["epoch"]
        return found["from"] if is_rest else next_rate(epoch)

    annealing.get_next_lr = rate_of_first_epoch


def _annealing(trainer: Any) -> Any:
    """Return fairseq's schedule, if it starts each epoch from the rate of the one before."""
    from fairseq.optim.lr_scheduler.polynomial_decay_schedule import PolynomialDecayLRSchedule

    schedule = trainer.lr_scheduler
    anneals = isinstance(schedule, PolynomialDecayLRSchedule) and schedule.cfg.force_anneal is not None
    return schedule if anneals else None


def _schedule(trainer: Any) -> Any:
    """Return torch's schedule within fairseq's, if the rate falls on a plateau."""
    from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule

    schedule = trainer.lr_scheduler
    return schedule.lr_scheduler if isinstance(schedule, ReduceLROnPlateauLRSchedule) else None
