"""What a command's ``--json FILE`` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from smlp.errors import UserError


def write_json(path: str, value: Any) -> None:
    """Writes ``value`` to a file.

    Raises:
        UserError: it cannot be written, or there is something else than JSON in it; the message names the file.
    """
    try:
        if Path(path).is_file() and Path(path).read_bytes()[:1] not in (b"", b"{", b"["):
            raise UserError(f"--json {path}: there is a file of another kind already: name another one")
        Path(path).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write --json {path}: {error.strerror}") from None
