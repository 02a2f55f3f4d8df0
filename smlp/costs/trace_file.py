"""One Chrome trace of several profiles, written as they come."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from pathlib import Path
from typing import Any

#: entries that only join others by arrows
_ARROWS = ("s", "t", "f")


class TraceFile:
    """A compressed file that takes the traces of one process and has its name only when it is complete.

    Args:
        path: of the file, ``.json.gz``; nothing is written before the first trace.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f"{path.name}.tmp")  # a killed run's is written over
        self._file: Any = None
        self._num_arrows = 0

    def add(self, trace: dict[str, Any]) -> None:
        """Adds a trace as torch's profiler writes it.

        Raises:
            OSError: it cannot be written.
        """
        is_first = self._file is None
        if is_first:
            self._file = gzip.open(self._temporary, "wt", compresslevel=5, encoding="utf-8")  # noqa: SIM115
            head = {key: value for key, value in trace.items() if key not in ("traceEvents", "traceName")}
            self._file.write(json.dumps({**head, "traceEvents": []}).removesuffix("]}") + "\n")
        # each profile counts its arrows from one
        last = self._num_arrows
        lines = []
        for entry in trace["traceEvents"]:
            if entry.get("ph") in _ARROWS:
                entry = {**entry, "id": entry["id"] + last}
                self._num_arrows = max(self._num_arrows, entry["id"])
            lines.append(json.dumps(entry))
        self._file.write(("" if is_first else ",\n") + ",\n".join(lines))

    def close(self) -> None:
        """Completes the file, if there is one.

        Raises:
            OSError: it cannot be written.
        """
        if self._file is not None:
            self._file.write("\n]}\n")
            self._file.close()
            self._file = None
            os.replace(self._temporary, self.path)

    def discard(self) -> None:
        """Leaves nothing behind, after a failure."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
        self._temporary.unlink(missing_ok=True)
