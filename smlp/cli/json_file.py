"""What a command's ``--json FILE`` and ``--output FILE`` write."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smlp.errors import UserError


def write_json(path: str, value: Any) -> None:
    """Writes ``value`` to a file.

    Raises:
        UserError: it cannot be written, or there is something else than JSON in it; the message names the file.
    """
    with _naming("--json", path):
        _refuse_other_kinds("--json", path)
        Path(path).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


@contextmanager
def json_lines(option: str, path: str) -> Iterator[Callable[[Any], None]]:
    """Opens a file (``-`` for standard output) for objects, one a line; gives the function that writes one.

    Each line is on its way to the disk when the function returns, so that an interrupted command leaves what it did.

    Raises:
        UserError: it cannot be written, or there is something else than JSON in it; the message names option and file.
    """
    if path == "-":
        yield lambda value: print(json.dumps(value), flush=True)
        return
    with _naming(option, path):
        _refuse_other_kinds(option, path)
        file = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115

    def write(value: Any) -> None:
        with _naming(option, path):
            file.write(json.dumps(value) + "\n")

    try:
        yield write
    finally:
        # after a failed write there is nothing to add to its message
        if sys.exc_info()[0] is None:
            with _naming(option, path):
                file.close()


@contextmanager
def _naming(option: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {option} {path}: {error.strerror}") from None


def _refuse_other_kinds(option: str, path: str) -> None:
    if Path(path).is_file() and Path(path).read_bytes()[:1] not in (b"", b"{", b"["):
        raise UserError(f"{option} {path}: there is a file of another kind already: name another one")
