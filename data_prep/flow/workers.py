"""Work on parts in several processes, show progress, and end workers whose parent was killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from data_prep.flow.parts import FilePart
from smlp.errors import UserError

if TYPE_CHECKING:
    from tqdm import tqdm


def bytes_bar(total: int | None, label: str, quiet: bool, done: int = 0) -> tqdm:
    """Return a progress bar that counts bytes; leaving its ``with`` closes it.

    ``total`` includes the bytes that an earlier run has ``done``, and is None if it is unknown.
    """
    from tqdm import tqdm

    return tqdm(
        total=total, initial=done, unit="B", unit_scale=True, desc=label, disable=quiet, file=sys.stderr, mininterval=1
    )


#: whether Ctrl-C has reached this worker
_interrupted = threading.Event()


class PartFailed(Exception):
    """A part cannot be done now, but the others can. The message is one sentence that names it."""


def work_on(
    parts: Sequence[FilePart], do_part: Callable[[FilePart], None], num_workers: int, label: str, quiet: bool
) -> dict[str, str]:
    """Work on all parts, in this process (``num_workers`` is 1) or in several, and show a progress bar.

    ``do_part`` does one part. It is at the top of a module, or a ``functools.partial`` of such a function.

    Returns:
        The messages of parts that raised :class:`PartFailed`, by their names.

    Raises:
        UserError: another part's own, after the parts at work are finished; or a worker was killed.
    """
    failed: dict[str, str] = {}
    with bytes_bar(sum(part.num_bytes for part in parts), label, quiet) as bar:
        if num_workers > 1 and len(parts) > 1:
            _in_processes(parts, do_part, num_workers, bar, failed)
            return failed
        for part in parts:
            try:
                do_part(part)
            except PartFailed as error:
                failed[part.name] = str(error)
            bar.update(part.num_bytes)
    return failed


def _in_processes(
    parts: Sequence[FilePart], do_part: Callable[[FilePart], None], num_workers: int, bar: Any, failed: dict[str, str]
) -> None:
    waiting = sorted(parts, key=lambda part: -part.num_bytes)  # longest first: no long part runs alone at the end
    errors: list[BaseException] = []
    running: dict[Future, FilePart] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_workers, len(parts)), mp_context=context, initializer=_begin_worker) as pool:
        try:
            while running or (waiting and not errors):
                while waiting and not errors and len(running) < num_workers:
                    part = waiting.pop(0)
                    with _interrupts(signal.SIG_BLOCK):  # a worker that starts now inherits this
                        try:
                            running[pool.submit(_interruptibly, do_part, part)] = part
                        except BrokenProcessPool:
                            raise _killed([part, *running.values()], num_workers) from None
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    part = running.pop(future)
                    error = future.exception()
                    if isinstance(error, BrokenProcessPool):
                        raise _killed([part, *running.values()], num_workers) from None
                    if isinstance(error, PartFailed):
                        failed[part.name] = str(error)
                    elif error is not None:
                        errors.append(error)
                    bar.update(part.num_bytes)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if errors:
        raise errors[0]


def _killed(parts: Sequence[FilePart], num_workers: int) -> UserError:
    names = ", ".join(sorted({str(part.path) for part in parts}))
    return UserError(
        f"a worker was killed (out of memory?) at {names}; what is finished is kept: run the same command again, with "
        f"fewer --workers than {num_workers} if memory was short"
    )


@contextmanager
def _interrupts(how: int) -> Iterator[None]:
    """Hold Ctrl-C back, or let it through: ``signal.SIG_BLOCK`` or ``SIG_UNBLOCK``."""
    before = signal.pthread_sigmask(how, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _interruptibly(do_part: Callable[[FilePart], None], part: FilePart) -> None:
    """Do a part in a worker. Only this can be interrupted: a worker that starts or waits would print a traceback.

    A worker that was interrupted does none of the parts that it still finds in the queue.
    """
    if _interrupted.is_set():
        raise KeyboardInterrupt
    try:
        with _interrupts(signal.SIG_UNBLOCK):
            do_part(part)
    except KeyboardInterrupt:
        _interrupted.set()
        raise


def _begin_worker() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End a worker whose parent was killed: it would write along with the repeated command's, and wait for ever."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
