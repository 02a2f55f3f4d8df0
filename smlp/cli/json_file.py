"""What a command's ``--json FILE`` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from smlp.errors import UserError


def write_json(path: str, value: Any) -> None:
    """Writes ``value`` to a file.

    Raises:
        UserError: it cannot be written; the message names the file and the reason.
    """
    try:
        Path(path).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write --json {path}: {error.strerror}") from None
