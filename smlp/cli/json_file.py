"""What options such as ``--json FILE`` write."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from smlp.errors import UserError


def write_json(path: str, value: Any) -> None:
    """Writes ``value`` to the file of ``--json``.

    Raises:
        UserError: it cannot be written, or there is something else than JSON in it; the message names the file.
    """
    _write("--json", path, json.dumps(value, indent=1) + "\n")


def write_json_lines(option: str, path: str, records: Iterable[Any]) -> None:
    """Writes a line of JSON for each record to the file of an option.

    Raises:
        UserError: as above.
    """
    _write(option, path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def check_output(option: str, path: str) -> None:
    """Refuses a file that cannot be meant, or whose folder is missing, before any work is done for it.

    Raises:
        UserError: as above.
    """
    try:
        with open(path if Path(path).is_file() else os.devnull, "rb") as file:
            if file.read(1) not in (b"", b"{", b"["):
                raise UserError(f"{option} {path}: there is a file of another kind already: name another one")
    except OSError as error:
        raise UserError(f"cannot read {option} {path}: {error.strerror}") from None
    if not Path(path).parent.is_dir():
        raise UserError(f"cannot write {option} {path}: there is no folder {Path(path).parent}")


def _write(option: str, path: str, text: str) -> None:
    check_output(option, path)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {option} {path}: {error.strerror}") from None
