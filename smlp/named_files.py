"""Files that a user names, read whole.

They may be pipes (``<(command)`` in a shell): where nobody writes to one, that is an error and no endless wait.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path


def read_bytes(path: str | Path) -> bytes:
    """The content of a file.

    Raises:
        OSError: it cannot be read, or is a pipe that nothing writes to.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        content = b""
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            content = file.read(1)  # None where there is a writer that has not written yet
            if content == b"":
                raise OSError(errno.EPIPE, "nothing writes to this pipe", str(path))
        os.set_blocking(file.fileno(), True)
        return (content or b"") + file.read()


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """The content of a text file, with any kind of line end as ``\\n``.

    Raises:
        OSError: as :func:`read_bytes`.
        UnicodeDecodeError: the file is in another encoding.
    """
    return io.StringIO(read_bytes(path).decode(encoding), newline=None).read()
