"""Waiting for data in fairseq's training log: ``data_wait``, in percent of the time from update to update.

What is measured is the time that rank 0 spends in asking for the next batches, over the time from the end of one update
to the end of the next; the log shows both sums' ratio, over the same updates as ``wps``.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from fairseq.logging import metrics


class _Clock:
    """Seconds of waiting since the last update, and when that update was done."""

    waited = 0.0
    done: float | None = None


def apply() -> None:
    from fairseq.data.iterators import GroupedIterator
    from fairseq.trainer import Trainer

    following, update = GroupedIterator.__next__, Trainer.train_step

    @functools.wraps(following)
    def next_batches(self: GroupedIterator) -> Any:
        start = time.perf_counter()
        if _Clock.done is None:
            _Clock.done = start
        try:
            return following(self)
        finally:
            _Clock.waited += time.perf_counter() - start

    @functools.wraps(update)
    def train_step(self: Trainer, *args: Any, **kw: Any) -> Any:
        result = update(self, *args, **kw)
        now = time.perf_counter()
        if _Clock.done is not None and now > _Clock.done:
            seconds = now - _Clock.done
            metrics.log_scalar("data_wait", 100 * _Clock.waited / seconds, weight=seconds, priority=1490, round=2)
        _Clock.waited, _Clock.done = 0.0, now
        return result

    GroupedIterator.__next__ = next_batches
    Trainer.train_step = train_step
