"""Progress of a command, on standard error."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smlp.nn.state import ForwardContext

#: seconds between lines: on a terminal, where each replaces the last, and elsewhere
TERMINAL_SECONDS, LOG_SECONDS = 0.1, 30.0


class ProgressLine:
    """A line that is redrawn on a terminal; in a file or a pipe, a new line now and then."""

    def __init__(self) -> None:
        self._start, self._said, self._width = time.monotonic(), -math.inf, 0

    def say(self, text: str, is_last: bool = False) -> None:
        """Show the text, unless one was shown just now."""
        is_terminal = sys.stderr.isatty()
        # short work leaves no line in a log
        since = time.monotonic() - (self._said if is_terminal else max(self._said, self._start))
        if not (is_last and is_terminal) and since < (TERMINAL_SECONDS if is_terminal else LOG_SECONDS):
            return
        self._said = time.monotonic()
        if is_terminal:
            print(f"\r{text:<{self._width}} ", end="\n" if is_last else "", file=sys.stderr, flush=True)
            self._width = len(text)
        else:
            print(text, file=sys.stderr, flush=True)


class RecordsProgress:
    """Progress over the records of several tasks.

    Args:
        total: records of all tasks.
        shown: whether anything is printed.
    """

    def __init__(self, total: int, shown: bool) -> None:
        self.total, self.shown = total, shown
        self.done, self.known, self.start = 0, 0, time.monotonic()
        self._line = ProgressLine()

    def of(self, task: str, known: int = 0) -> Callable[[int], None]:
        """Return a function that counts records of a task that have been done since its last call.

        Args:
            task: its name.
            known: records that an earlier run has done, which are no part of the rate.
        """
        self.known += known

        def count(num_records: int) -> None:
            self.done += num_records
            if self.shown:
                rate, done = self.done / max(time.monotonic() - self.start, 1e-9), self.done + self.known
                text = f"{task}: {done:,} of {self.total:,} records, {rate:,.1f} a second"
                self._line.say(text, is_last=done == self.total)

        if known:
            count(0)
        return count


class BatchesProgress:
    """Progress over the batches of one rank.

    Args:
        num_batches: of this rank.
        num_ranks: number of ranks, each of which has as many batches.
    """

    def __init__(self, num_batches: int, num_ranks: int) -> None:
        self.num_batches, self.num_ranks = num_batches, num_ranks
        self.done = self.positions = 0
        self.start = time.perf_counter()
        self._line = ProgressLine()

    def __call__(self, context: ForwardContext) -> None:
        """Count a forward pass."""
        self.done += 1
        self.positions += context.tokens_Bn.numel()
        rate = self.num_ranks * self.positions / (time.perf_counter() - self.start)
        text = f"{self.done}/{self.num_batches} batches, {rate:,.0f} positions/s"
        self._line.say(text, is_last=self.done == self.num_batches)
