"""End the thread that reads batches ahead when its batches are no longer needed."""

from __future__ import annotations

import functools
import queue
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any


def apply() -> None:
    """Let a buffer that is dropped before its end stop its thread.

    The thread of a loop that is left early, as every validation with ``--max-valid-steps`` is, otherwise waits for
    ever for room in its buffer. It keeps the batches there, each with open files of shared memory, until the process
    has no more descriptors. It also reads from the same data loader as the thread of the next validation.
    """
    from fairseq.data.iterators import BufferedIterator

    create = BufferedIterator._create_consumer

    @functools.wraps(create)
    def create_consumer(self: BufferedIterator) -> None:
        self._is_dropped = threading.Event()
        self._iterable = _until(self._is_dropped, self._iterable)
        create(self)

    BufferedIterator._create_consumer = create_consumer
    BufferedIterator.__del__ = _stop_reading


def _until(is_dropped: threading.Event, source: Iterable[Any]) -> Iterator[Any]:
    for item in source:
        yield item
        if is_dropped.is_set():
            return


def _stop_reading(buffer: Any) -> None:
    """End the thread of a buffer, if it was started, and wait for it."""
    thread = getattr(buffer, "_consumer", None)
    if thread is None or sys.is_finalizing():  # such threads no longer run when Python shuts down
        return
    buffer._is_dropped.set()
    while thread.is_alive():
        with suppress(queue.Empty):  # make room for the item that it is about to put
            buffer._queue.get(timeout=0.05)
