"""End threads that read batches ahead when these are no longer needed, and processes that cannot pass theirs on."""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.queues import Queue
from typing import Any

from torch.utils.data._utils import signal_handling

from smlp.fairseq_compat.replacing import replacing

_MOST_SECONDS_AT_EXIT = 5.0  # for a source that does not answer


def apply() -> None:
    """Let a buffer that is dropped before its end stop its thread.

    The thread of a loop that is left early, as every validation with ``--max-valid-steps`` is, otherwise waits for
    ever for room in its buffer. It keeps the batches there, each with open files of shared memory, until the process
    has no more descriptors. It also reads from the same data loader as the thread of the next validation. A thread that
    is inside of torch when Python shuts down, as after Ctrl-C, aborts the process, so all end before that.

    A worker of a data loader that cannot pass a batch, as without room in /dev/shm, ends. It would only print the
    error, and training would wait for that batch for ever.

    An epoch's iterator and its data loader are freed when they are no longer used, as after each epoch of several data
    folders. In fairseq they hold each other, and of such garbage Python closes the queues to the workers first: the
    workers are not told to end, and the process waits for them for 5 s each.
    """
    from fairseq.data.iterators import BufferedIterator, EpochBatchIterator, FrozenBatchSampler

    buffers = weakref.WeakSet[BufferedIterator]()

    @replacing(BufferedIterator, "_create_consumer")
    def create_consumer(create: Any, self: BufferedIterator) -> None:
        self._is_dropped = threading.Event()
        self._iterable = _until(self._is_dropped, self._iterable)
        create(self)
        buffers.add(self)

    BufferedIterator.__del__ = _stop_reading
    atexit.register(_stop_at_exit, buffers)

    @replacing(FrozenBatchSampler, "__init__")
    def begin_sampler(init: Any, self: FrozenBatchSampler, ordered_batches: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(getattr(ordered_batches, "__self__", None), EpochBatchIterator):
            held = weakref.WeakMethod(ordered_batches)
            init(self, lambda *args, **kwargs: held()(*args, **kwargs), *args, **kwargs)
        else:
            init(self, ordered_batches, *args, **kwargs)

    @replacing(signal_handling, "_set_worker_signal_handlers")
    def begin_worker(set_worker_handlers: Any) -> None:
        set_worker_handlers()
        Queue._on_queue_feeder_error = staticmethod(_end_worker)


def _end_worker(error: Exception, batch: Any) -> None:
    with suppress(OSError):
        print(f"a process that reads batches cannot pass them on: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _until(is_dropped: threading.Event, source: Iterable[Any]) -> Iterator[Any]:
    for item in source:
        yield item
        if is_dropped.is_set():
            return


def _stop_at_exit(buffers: Iterable[Any]) -> None:
    limit = time.monotonic() + _MOST_SECONDS_AT_EXIT
    for buffer in list(buffers):
        _stop_reading(buffer, limit)


def _stop_reading(buffer: Any, limit: float = float("inf")) -> None:
    """End the thread of a buffer, if it was started, and wait for it until the clock shows ``limit``."""
    thread = getattr(buffer, "_consumer", None)
    if thread is None:
        return
    buffer._is_dropped.set()
    if thread is threading.current_thread():  # which collects the garbage that the buffer was part of
        return
    while thread.is_alive() and time.monotonic() < limit:
        with suppress(queue.Empty):  # make room for the item that it is about to put
            buffer._queue.get(timeout=0.05)
    buffer._consumer = None
