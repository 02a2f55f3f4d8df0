"""Training that saves and leaves when a signal asks it to, and goes on from there when it is started again.

SIGUSR1 or SIGTERM, to all ranks or to one of them, ends a run after the update that it is in: all ranks save
``checkpoint_last.pt``, as fairseq does whenever it stops, without validating first, and leave with exit status
:data:`smlp.launch.stop_signals.EXIT_STOPPED`. In a validation they leave at once. A run whose last update is done ends
as it would have. Before the first update the signals end a process as usual: there is nothing to save.
"""

from __future__ import annotations

import functools
import logging
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing import ProcessExitedException
from torch.utils.data._utils import signal_handling

from smlp.launch.stop_signals import EXIT_STOPPED, SIGNALS, StopSignals
from smlp.launch.team import leave

logger = logging.getLogger(__name__)

_signals = StopSignals()


def apply() -> None:
    from fairseq.distributed import utils as distributed_utils
    from fairseq.trainer import Trainer

    call_main = distributed_utils.call_main
    update = Trainer.train_step
    validate_batch = Trainer.valid_step
    aggregate = Trainer._aggregate_logging_outputs
    training_time = Trainer.cumulative_training_time
    train_iterator = Trainer.get_train_iterator
    set_worker_handlers = signal_handling._set_worker_signal_handlers

    @functools.wraps(call_main)
    def stoppable_call_main(cfg: Any, main: Callable[..., Any], **kwargs: Any) -> None:
        try:
            with _signals_for_spawned(cfg):
                call_main(cfg, main, **kwargs)
        finally:
            _signals.uninstall()

    @functools.wraps(update)
    def train_step(self: Trainer, *args: Any, **kw: Any) -> Any:
        _signals.install()
        result = update(self, *args, **kw)
        self._update_just_done = True
        return result

    @functools.wraps(aggregate)
    def aggregate_with_wish(self: Trainer, logging_outputs: list, *sums: Any, ignore: bool = False) -> Any:
        # Signals reach ranks at different times: what counts is the sum, which all of them see after the same update.
        asked = int(_signals.received is not None)
        logging_outputs, (*sums, asked) = aggregate(self, logging_outputs, *sums, asked, ignore=ignore)
        self._stop_agreed = bool(asked > 0)
        return logging_outputs, sums

    @functools.wraps(training_time)
    def cumulative_training_time(self: Trainer) -> float:
        # fairseq asks for it after each update, when the update is logged and before it validates or saves.
        if getattr(self, "_update_just_done", False):
            self._update_just_done = False
            _leave_if_asked(self)
        return training_time(self)

    @functools.wraps(validate_batch)
    def valid_step(self: Trainer, *args: Any, **kw: Any) -> Any:
        result = validate_batch(self, *args, **kw)
        _leave_if_asked(self)
        return result

    @functools.wraps(train_iterator)
    def get_train_iterator(self: Trainer, *args: Any, **kw: Any) -> Any:
        _signals.prepare()  # fairseq builds the first data loader after this
        self._train_iterator = train_iterator(self, *args, **kw)
        return self._train_iterator

    @functools.wraps(set_worker_handlers)
    def set_handlers_of_worker() -> None:
        # torch's own one for SIGTERM ends a worker, with status 0 if it comes from the owner and else as a failure.
        set_worker_handlers()
        _signals.become_worker(0)

    distributed_utils.call_main = stoppable_call_main
    signal_handling._set_worker_signal_handlers = set_handlers_of_worker
    Trainer.train_step = train_step
    Trainer.valid_step = valid_step
    Trainer._aggregate_logging_outputs = aggregate_with_wish
    Trainer.cumulative_training_time = cumulative_training_time
    Trainer.get_train_iterator = get_train_iterator


def _leave_if_asked(trainer: Any) -> None:
    if trainer.data_parallel_world_size > 1:
        asked = getattr(trainer, "_stop_agreed", False)
    else:
        asked = _signals.received is not None
    if asked and not _is_last_update(trainer):
        _save_and_leave(trainer)


def _is_last_update(trainer: Any) -> bool:
    """Whether training ends here anyway. fairseq, started again from such a checkpoint, would do an update too many."""
    optimization, batches = trainer.cfg.optimization, trainer._train_iterator
    if trainer.get_num_updates() >= (optimization.max_update or math.inf):
        return True
    return batches.end_of_epoch() and batches.epoch >= (optimization.max_epoch or math.inf)


def _save_and_leave(trainer: Any) -> None:
    from fairseq import checkpoint_utils
    from fairseq.distributed import utils as distributed_utils
    from fairseq.file_io import PathManager

    name = _signals.received.name if _signals.received else "a signal to another rank"
    config, num_updates = trainer.cfg.checkpoint, trainer.get_num_updates()
    path = checkpoint_utils.save_checkpoint(config, trainer, trainer._train_iterator, None)
    if path is not None and hasattr(trainer.task, "post_save"):
        trainer.task.post_save(path, num_updates)
    if config.write_checkpoints_asynchronously:
        PathManager.async_close()
    if trainer.data_parallel_world_size > 1:
        torch.distributed.barrier(distributed_utils.get_global_group())
    # Some launchers end the other ranks when the first one leaves: from here on nothing is lost, and the status stays.
    _signals.leave()
    leave()
    if distributed_utils.is_master(trainer.cfg.distributed_training):
        saved = f"saved {path}; the same command goes on from it" if path else "nothing is saved with these options"
        logger.info(f"stopped by {name} after update {num_updates}: {saved} (exit status {EXIT_STOPPED})")
    sys.exit(EXIT_STOPPED)


@contextmanager
def _signals_for_spawned(cfg: Any) -> Iterator[None]:
    """Where fairseq spawns a process for each GPU: passes signals on to them, and their exit status back."""
    distributed = cfg.distributed_training
    if distributed.distributed_no_spawn or distributed.distributed_world_size == 1:
        yield
        return
    previous = {number: signal.signal(number, _pass_on) for number in SIGNALS}
    try:
        yield
    except ProcessExitedException as error:
        if error.exit_code == EXIT_STOPPED:
            sys.exit(EXIT_STOPPED)
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _pass_on(number: int, frame: FrameType | None) -> None:
    children = multiprocessing.active_children()
    for child in children:
        os.kill(child.pid, number)
    if not children:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
