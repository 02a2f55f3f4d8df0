"""How far a step is, on standard error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm


def bytes_bar(total: int | None, label: str, quiet: bool, done: int = 0) -> tqdm:
    """A bar that counts bytes; it is closed by leaving its ``with``.

    Args:
        total: bytes to come, those ``done`` included; None if nobody knows.
        label: before the bar.
        quiet: show nothing.
        done: bytes, from an earlier run.
    """
    from tqdm import tqdm

    return tqdm(
        total=total,
        initial=done,
        unit="B",
        unit_scale=True,
        desc=label,
        disable=quiet,
        file=sys.stderr,
        mininterval=1,
    )
