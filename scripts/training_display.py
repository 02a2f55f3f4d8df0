"""Show a live line for a training run, from what fairseq-train writes with --log-format json."""

from __future__ import annotations

import json
import sys
import time

_WIDTH = 24


class TrainingDisplay:
    """Show the progress of a training run from the lines of its log.

    On a terminal one line is redrawn; elsewhere a line is printed at every tenth of the way.
    """

    def __init__(self, name: str, num_updates: int) -> None:
        self.name, self.num_updates = name, num_updates
        self.live = sys.stdout.isatty()
        self.valid = ""
        self._start: tuple[float, int] | None = None  # when training was first seen, and at which update
        self._last_tenth = 0

    def feed(self, line: str) -> None:
        """Take one line of output; only fairseq's records count."""
        if "{" not in line:
            return
        try:
            record = json.loads(line[line.index("{") :])
        except json.JSONDecodeError:
            return
        if "valid_ppl" in record:
            self.valid = f"  valid ppl {float(record['valid_ppl']):.1f}"
        if "ppl" in record and "num_updates" in record and "update" in record:
            self._show(int(record["num_updates"]), float(record["ppl"]), record.get("wps", "?"))

    def _show(self, done: int, perplexity: float, words_per_second: str) -> None:
        now = time.monotonic()
        if self._start is None:
            self._start = (now, done)
        elapsed, since = now - self._start[0], done - self._start[1]
        left = f"{elapsed / since * (self.num_updates - done):4.0f} s left" if since else ""
        filled = round(_WIDTH * done / self.num_updates)
        bar = "#" * filled + "." * (_WIDTH - filled)
        line = (
            f"      [{bar}] {done}/{self.num_updates}  train ppl {perplexity:8.1f}{self.valid}  "
            f"{words_per_second} tokens/s  {left}"
        )
        if self.live:
            print(f"\r{line:<120}", end="", flush=True)
        elif done * 10 // self.num_updates > self._last_tenth:
            self._last_tenth = done * 10 // self.num_updates
            print(line, flush=True)

    def close(self) -> None:
        """End the line."""
        if self.live:
            print(flush=True)
