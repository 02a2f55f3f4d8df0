"""A file of JSON lines that grows with the training of a model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from smlp.errors import UserError
from smlp.files import write_whole

logger = logging.getLogger(__name__)


class Journal:
    """One line for each update that is reported, in order and without repetition also where training was resumed.

    Opening it drops lines of later updates than the one that training goes on from (written by a run that was stopped
    after its last checkpoint) and lines that are damaged. If the file cannot be written, one warning says so and
    training goes on.

    Args:
        path: of the file; its directory is made.
        num_updates: updates done before this process.
        what: is recorded, for the warning.
    """

    def __init__(self, path: Path, num_updates: int, what: str) -> None:
        self.path: Path | None = path
        self.what = what
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                self._drop_after(path, num_updates)
        except (OSError, UserError) as error:
            self._give_up(error)

    def append(self, record: dict[str, Any]) -> None:
        """Adds a record, which has its number under ``"update"``."""
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            self._give_up(error)

    @staticmethod
    def _drop_after(path: Path, num_updates: int) -> None:
        text = path.read_bytes()
        lines = text.splitlines(keepends=True)
        kept = b"".join(line for line in lines if _is_up_to(line, num_updates))
        if kept != text:
            write_whole(path, lambda file: file.write(kept))

    def _give_up(self, error: Exception) -> None:
        logger.warning(f"no {self.what} from here on: cannot write {self.path}: {error}")
        self.path = None


def _is_up_to(line: bytes, num_updates: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["update"] <= num_updates
    except (ValueError, KeyError, TypeError):
        return False
