"""Reading what a run left behind: a damaged or missing file is a note, never the end of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """The object in a JSON file; None where it is missing, or damaged, which is noted by name."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read ({_reason(error)})")
        return None
    if not isinstance(found, dict):
        notes.append(f"{path.name} holds no JSON object")
        return None
    return found


def read_json_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The objects of a file that has one in each line; lines that are none are left out and counted in a note."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({_reason(error)})")
        return []
    found, damaged = [], 0
    for line in filter(str.strip, lines):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if isinstance(record, dict):
            found.append(record)
        else:
            damaged += 1
    if damaged:
        notes.append(f"{path.name}: {damaged} of {len(found) + damaged} lines are damaged and left out")
    return found


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else "it is not JSON"
