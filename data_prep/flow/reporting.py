"""How a step ends: what it counted, what was wrong, where the result is, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from data_prep.flow.manifest import MANIFEST, Counts
from data_prep.flow.running import Finished, Run

MAX_DEFECTS = 20  # on the terminal; the manifest has them all


@dataclass(frozen=True)
class Report:
    """Prints the end of a step to standard output; its methods return the exit status."""

    step: str
    run: Run
    start: float

    def finished(self, manifest: dict[str, Any], *lines: str) -> int:
        """All parts are done and the manifest is written; ``lines`` are what the step has to say besides."""
        defects = manifest["defects"]
        for defect in defects[:MAX_DEFECTS]:
            print(f"{defect['problem']}: {defect['where']}")
        if len(defects) > MAX_DEFECTS:
            print(f"... {len(defects) - MAX_DEFECTS} more in {MANIFEST}")
        counts = Counts.from_json(manifest["counts"]).table()
        if counts:
            print(counts)
        for line in lines:
            print(line)
        seconds = time.perf_counter() - self.start
        megabytes = sum(_size(row) for row in manifest["inputs"]) / 1e6
        print(
            f"{self.step}: {len(manifest['outputs'])} files in {self.run.out}; {megabytes:,.1f} MB of files read in "
            f"{seconds:,.1f} s ({megabytes / max(seconds, 1e-9):,.1f} MB/s with {self.run.workers} workers)"
        )
        return 0

    def waiting(self, finished: Finished, what: str) -> int:
        """This share is done, others are not: the command must be run again when they are."""
        print(
            f"{self.step}: this share of {what} is done; {finished.missing} parts are left to other shares: run the "
            "command again when they have ended"
        )
        return 0


@contextmanager
def report(step: str, run: Run) -> Iterator[Report]:
    """Measures the time from here to the step's end."""
    yield Report(step, run, time.perf_counter())


def _size(row: dict[str, Any]) -> int:
    start, stop = row.get("range", (0, row["bytes"]))
    return stop - start
