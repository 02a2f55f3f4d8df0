"""Checkpoints that are either whole or absent, and one clear sentence when the disk is full.

fairseq writes a checkpoint to ``NAME.tmp`` and renames it, without waiting for the disk; the second and third name
of the same checkpoint (``checkpoint_best.pt``, ``checkpoint_last.pt``) it then copies in place, so a run killed in
that moment leaves a truncated ``checkpoint_last.pt``, the very file from which it would resume. Here every file is
written under a temporary name beside its target, flushed to the disk and renamed. The checkpoints keep their names.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from smlp.errors import UserError

logger = logging.getLogger(__name__)

# A second attempt can help with these (network file systems); with a full disk it only loses time.
_TRANSIENT = {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT}
_ATTEMPTS = 3
_PAUSE_SECONDS = 2.5


def apply() -> None:
    from fairseq import checkpoint_utils
    from fairseq.file_io import PathManager

    save = checkpoint_utils.torch_persistent_save
    verify_directory = checkpoint_utils.verify_checkpoint_directory

    @functools.wraps(save)
    def torch_persistent_save(obj: Any, filename: str, async_write: bool = False) -> None:
        if async_write or not PathManager.supports_rename(filename):
            save(obj, filename, async_write)
        else:
            save_whole(obj, filename)

    class CheckpointPathManager(PathManager):
        @staticmethod
        def copy(src_path: str, dst_path: str, overwrite: bool = False) -> bool:
            if PathManager.path_requires_pathmanager(src_path) or not PathManager.supports_rename(dst_path):
                return PathManager.copy(src_path, dst_path, overwrite=overwrite)
            if os.path.exists(dst_path) and not overwrite:
                raise FileExistsError(dst_path)
            copy_whole(src_path, dst_path)
            return True

    @functools.wraps(verify_directory)
    def verify_checkpoint_directory(save_dir: str) -> None:
        try:
            verify_directory(save_dir)
        except OSError as error:
            raise UserError(f"cannot write to --save-dir {save_dir}: {error.strerror}") from error

    checkpoint_utils.torch_persistent_save = torch_persistent_save
    checkpoint_utils.verify_checkpoint_directory = verify_checkpoint_directory
    checkpoint_utils.PathManager = CheckpointPathManager  # in this module only: nothing else copies over a checkpoint


def save_whole(obj: Any, filename: str) -> None:
    """``torch.save`` to a file that appears under its name only when it is complete and on the disk.

    Raises:
        UserError: the file cannot be written. While another exception is being handled (fairseq saves ``crash.pt``
            then), the failure is only logged, so that it does not take the place of that exception.
    """
    while_crashing = sys.exc_info()[1] is not None
    try:
        write_whole(filename, lambda file: torch.save(obj, file))
    except UserError as error:
        if not while_crashing:
            raise
        logger.error(str(error))


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


def remove_leftovers(save_dir: str | Path) -> list[Path]:
    """Delete what a killed run left half-written in its save-dir (``checkpoint*.pt.PID.tmp``, and fairseq's own
    ``checkpoint*.pt.tmp``); returns the files deleted."""
    removed = []
    for leftover in sorted(Path(save_dir).glob("checkpoint*.pt*.tmp")):
        with contextlib.suppress(OSError):
            leftover.unlink()
            removed.append(leftover)
    return removed


def _os_error(error: BaseException | None) -> OSError | None:
    """The operating system's error behind one of torch, whose file writer raises its own while it closes."""
    while error is not None:
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
