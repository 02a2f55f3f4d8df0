"""Files that are either whole or absent, and one clear sentence when the disk is full."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from smlp.errors import UserError

# A second attempt can help with these (network file systems); with a full disk it only loses time.
_TRANSIENT = {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT}
_ATTEMPTS = 3
_PAUSE_SECONDS = 2.5


def copy_whole(source: str | Path, target: str | Path) -> None:
    """Copy a file so that ``target`` is at every moment either what it was or a complete copy.

    Raises:
        UserError: the copy cannot be written.
    """

    def write(file: BinaryIO) -> None:
        with open(source, "rb") as original:
            shutil.copyfileobj(original, file, 1 << 20)

    write_whole(target, write)


def write_whole(target: str | Path, write: Callable[[BinaryIO], None]) -> None:
    """Call ``write`` with a temporary file beside ``target``, force it to the disk, rename it to ``target``.

    Raises:
        UserError: the operating system refused; the temporary file is gone and an older ``target`` is untouched.
    """
    target = Path(target)
    # The process id keeps ranks apart that save the same name at once, as fairseq does with crash.pt.
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _write_and_rename(temporary, target, write)
            return
        except Exception as error:
            cause = _os_error(error)
            if cause is None:
                raise
            if cause.errno not in _TRANSIENT or attempt == _ATTEMPTS:
                raise UserError(_cannot_write(target, cause)) from error
            time.sleep(_PAUSE_SECONDS)


def _write_and_rename(temporary: Path, target: Path, write: Callable[[BinaryIO], None]) -> None:
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    # The new name is on the disk only when the directory is. Some file systems cannot sync one: then it follows later.
    with contextlib.suppress(OSError):
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _os_error(error: BaseException | None) -> OSError | None:
    """The operating system's error behind one of torch, whose file writer raises its own while it closes."""
    while error is not None and not isinstance(error, UserError):
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _cannot_write(target: Path, error: OSError) -> str:
    try:
        free = f"{shutil.disk_usage(target.parent).free:,} bytes free on that disk"
    except OSError:
        free = "that directory is gone"
    return f"cannot write {target}: {error.strerror} ({free}); the checkpoints saved before are untouched"
