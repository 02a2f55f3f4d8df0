"""Work on parts in several processes: progress, parts that fail, and the end of workers whose parent was killed."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from data_prep.flow.parts import Part
from smlp.errors import UserError

if TYPE_CHECKING:
    from tqdm import tqdm


def bytes_bar(total: int | None, label: str, quiet: bool, done: int = 0) -> tqdm:
    """A bar that counts bytes; it is closed by leaving its ``with``.

    Args:
        total: bytes to come, those ``done`` included; None if nobody knows.
        label: before the bar.
        quiet: show nothing.
        done: bytes, from an earlier run.
    """
    from tqdm import tqdm

    return tqdm(
        total=total, initial=done, unit="B", unit_scale=True, desc=label, disable=quiet, file=sys.stderr, mininterval=1
    )


POLL_SECONDS = 0.5

_bytes_done: Any = None  # of a worker: the counter that all share


class PartFailed(Exception):
    """Raised by a work: this part cannot be done now, the others can. The message is one sentence that names it."""


def work_on(
    parts: Sequence[Part], do_part: Callable[[Part], None], num_workers: int, label: str, quiet: bool
) -> dict[str, str]:
    """Works on all parts, in this process or in several.

    Args:
        parts: what to work on.
        do_part: does one; at the top of a module, or a ``functools.partial`` of such a function.
        num_workers: processes; 1 is this one.
        label: of the progress bar.
        quiet: show none.

    Returns:
        By name of the parts that raised :class:`PartFailed`, what they said.

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
    parts: Sequence[Part], do_part: Callable[[Part], None], num_workers: int, bar: Any, failed: dict[str, str]
) -> None:
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    waiting = sorted(parts, key=lambda part: -part.num_bytes)  # the longest first: the end is not one long part
    errors: list[BaseException] = []
    running: dict[Future, Part] = {}
    shown = 0
    with ProcessPoolExecutor(
        min(num_workers, len(parts)), mp_context=context, initializer=_begin_worker, initargs=(counter,)
    ) as pool:
        try:
            while running or (waiting and not errors):
                while waiting and not errors and len(running) < num_workers:
                    part = waiting.pop(0)
                    running[pool.submit(_counted, do_part, part)] = part
                finished, _ = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                for future in finished:
                    part = running.pop(future)
                    error = future.exception()
                    if isinstance(error, BrokenProcessPool):
                        names = ", ".join(sorted({str(part.path), *(str(other.path) for other in running.values())}))
                        raise UserError(
                            f"a worker was killed (out of memory?) at {names}; what is finished is kept: run the "
                            f"same command again, with fewer --workers than {num_workers} if memory was short"
                        ) from None
                    if isinstance(error, PartFailed):
                        failed[part.name] = str(error)
                    elif error is not None:
                        errors.append(error)
                bar.update(counter.value - shown)
                shown = counter.value
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if errors:
        raise errors[0]


def _counted(do_part: Callable[[Part], None], part: Part) -> None:
    do_part(part)
    with _bytes_done.get_lock():
        _bytes_done.value += part.num_bytes


def _begin_worker(counter: Any) -> None:
    global _bytes_done
    _bytes_done = counter
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would go on writing beside those of the repeated command, and wait forever."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
