"""Save and exit when a signal asks for it, so that training can be resumed.

SIGUSR1, SIGTERM or SIGHUP, to all ranks or to one of them, ends a run after the update that it is in: all ranks save
``checkpoint_last.pt``, as fairseq does whenever it stops, without validating first, and leave with exit status
:data:`smlp.launch.stop_signals.EXIT_STOPPED`. During validation they exit after the current batch. A run whose last
update is done ends as usual. Before the first update the signals end a process as usual: there is nothing to save.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing import ProcessExitedException
from torch.utils.data._utils import signal_handling

from smlp.fairseq_compat.plateaus import validations_in_vain
from smlp.fairseq_compat.replacing import replacing
from smlp.launch.stop_signals import EXIT_STOPPED, SIGNALS, StopSignals, heard
from smlp.launch.team import leave

logger = logging.getLogger(__name__)

#: the value of ``--restore-file`` unless it is given
DEFAULT_RESTORE_FILE = "checkpoint_last.pt"
#: stop signals that this process has received
stop_signals = StopSignals()


def apply() -> None:
    @replacing(signal_handling, "_set_worker_signal_handlers")
    def set_handlers_of_worker(set_worker_handlers: Any) -> None:
        # torch's handler for SIGTERM ends a worker: with status 0 if the owner sent it, otherwise as a failure.
        set_worker_handlers()
        stop_signals.become_worker(0)


def leave_if_asked(trainer: Any) -> None:
    """Save a trainer's checkpoint and exit, if a signal asked for it and training would not end here anyway."""
    if trainer.data_parallel_world_size > 1:
        asked = trainer.stop_agreed
    else:
        asked = stop_signals.received is not None
    if asked and not _is_last_update(trainer):
        _save_and_leave(trainer)


def leave_if_done(trainer: Any) -> None:
    """Exit with status 0 if a checkpoint that was just loaded is of a run that has ended; fairseq would train on."""
    num_updates, most = trainer.get_num_updates(), trainer.cfg.optimization.max_update
    patience, hours = trainer.cfg.checkpoint.patience, trainer.cfg.optimization.stop_time_hours
    if most and num_updates >= most:
        why = f"has {num_updates} updates and --max-update is {most}"
    elif 0 < patience <= (count := validations_in_vain()):
        why = f"has not improved in {count} validation{'s' * (count > 1)} and --patience is {patience}"
    elif num_updates and 0 < hours < trainer._previous_training_time / 3600:  # the same on all ranks
        why = f"has trained for longer than --stop-time-hours {hours:g}"
    else:
        return
    if trainer.is_data_parallel_master:
        logger.info(f"the checkpoint {why}: there is nothing to train")
    leave()
    sys.exit(0)


def _is_last_update(trainer: Any) -> bool:
    """Return whether training ends here anyway. Resumed from such a checkpoint, fairseq would do an update too many."""
    optimization, batches = trainer.cfg.optimization, trainer.train_iterator
    if trainer.get_num_updates() >= (optimization.max_update or math.inf):
        return True
    return batches.end_of_epoch() and batches.epoch >= (optimization.max_epoch or math.inf)


def _save_and_leave(trainer: Any) -> None:
    from fairseq import checkpoint_utils
    from fairseq.distributed import utils as distributed_utils

    name = stop_signals.received.name if stop_signals.received else "a signal to another rank"
    config, num_updates = trainer.cfg.checkpoint, trainer.get_num_updates()
    path = checkpoint_utils.save_checkpoint(config, trainer, trainer.train_iterator, None)
    if path is not None and hasattr(trainer.task, "post_save"):
        trainer.task.post_save(path, num_updates)
    if trainer.data_parallel_world_size > 1:
        torch.distributed.barrier(distributed_utils.get_global_group())
    # Some launchers end all ranks when the first one exits. Nothing can be lost from here on, and the status stays.
    stop_signals.leave()
    leave()
    if distributed_utils.is_master(trainer.cfg.distributed_training):
        saved = "nothing is saved with these options"
        if path is not None:
            saved = f"saved {path}; {how_to_resume(config, path, trainer.checkpoint_suffix)}"
        logger.info(f"stopped by {name} after update {num_updates}: {saved} (exit status {EXIT_STOPPED})")
    sys.exit(EXIT_STOPPED)


def without_suffix(path: str | Path, suffix: str) -> str:
    """Return the name that ``--restore-file`` takes for a checkpoint: fairseq adds ``--checkpoint-suffix`` to it."""
    return f"{str(path).removesuffix(f'{suffix}.pt')}.pt"


def how_to_resume(config: Any, path: str, suffix: str = "") -> str:
    """Return how training resumes from a checkpoint that was just saved, as the end of a sentence.

    Args:
        config: fairseq's options of checkpoints.
        path: the first name of the checkpoint; it may also be ``checkpoint_last.pt``.
        suffix: of the names of checkpoints.
    """
    last = Path(config.save_dir) / f"checkpoint_last{suffix}.pt"
    resets = [f"--reset-{of}" for of in ("optimizer", "lr-scheduler", "meters", "dataloader")]
    without = [option for option in resets if getattr(config, option[2:].replace("-", "_"))]
    added = ""
    if Path(path).name != last.name and config.no_last_checkpoints:
        added = f" with --restore-file {without_suffix(path, suffix)}"
        without += ["--finetune-from-model"] if config.finetune_from_model else []
    elif config.restore_file != DEFAULT_RESTORE_FILE:
        given = Path(config.restore_file.replace(".pt", suffix + ".pt"))
        without += ["--restore-file"] if given.resolve() != last.resolve() else []
    left_out = f" without {', '.join(without)}" if without else ""
    anew = ", with updates counted from 0, for it has no optimizer state" if config.no_save_optimizer_state else ""
    return f"the same command{added}{left_out} resumes from it{anew}"


@contextmanager
def stoppable(cfg: Any) -> Iterator[None]:
    """Handle signals while fairseq runs a tool inside the block.

    If fairseq spawns a process for each GPU, signals are passed on to them, and their exit status back.
    """
    distributed = cfg.distributed_training
    spawns = distributed.distributed_world_size > 1 and not distributed.distributed_no_spawn
    previous = {number: signal.signal(number, _pass_on) for number in heard(SIGNALS)} if spawns else {}
    try:
        yield
    except ProcessExitedException as error:
        if error.exit_code == EXIT_STOPPED:
            sys.exit(EXIT_STOPPED)
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        stop_signals.uninstall()


def _pass_on(number: int, frame: FrameType | None) -> None:
    children = multiprocessing.active_children()
    for child in children:
        os.kill(child.pid, number)
    if not children:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
