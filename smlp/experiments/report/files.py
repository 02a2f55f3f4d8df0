"""Reading what a run left behind: a damaged or missing file is a note, never the end of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from smlp.experiments.kept import wrong


def read_json(path: Path, notes: list[str], shape: Any = dict) -> dict[str, Any] | None:
    """The object in a JSON file; None where it is missing, or damaged, which is noted by name.

    Args:
        path: of the file.
        notes: takes what is wrong with it.
        shape: what it should hold (:mod:`smlp.experiments.kept`).
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read ({_reason(error)})")
        return None
    if not isinstance(found, dict):
        notes.append(f"{path.name} holds no JSON object")
        return None
    if problem := wrong(found, shape):
        notes.append(f"{path.name} is damaged: {problem}")
        return None
    return found


def read_json_lines(path: Path, notes: list[str], shape: Any = dict) -> list[dict[str, Any]]:
    """The objects of a file that has one in each line; lines that are none, or of another shape, are left out and
    counted in a note."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({_reason(error)})")
        return []
    found, damaged = [], 0
    for line in filter(str.strip, lines):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not wrong(record, shape):
            found.append(record)
        else:
            damaged += 1
    if damaged:
        notes.append(f"{path.name}: {damaged} of {len(found) + damaged} lines are damaged and left out")
    return found


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else "it is not JSON"
