"""How the command lines of this package end: 0 when done, 1 with one line on standard error for a user's mistake."""

from __future__ import annotations

import sys
from collections.abc import Callable

from smlp.errors import UserError


def run(main: Callable[[], None]) -> int:
    """Calls ``main`` and returns the exit status; any other exception keeps its traceback."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # no permission, disk full, ...
        print(f"error: {error.filename or 'input/output'}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0
