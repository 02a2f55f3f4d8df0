"""Write checkpoints that are either whole or absent, and say it in one sentence if the disk is full.

fairseq writes a checkpoint to ``NAME.tmp`` and renames it, without waiting for the disk; the second and third name
of the same checkpoint (``checkpoint_best.pt``, ``checkpoint_last.pt``) it then copies in place, so a run killed in
that moment leaves a truncated ``checkpoint_last.pt``, the very file from which it would resume. Here every file is
written under a temporary name next to its target, flushed to the disk and renamed. The checkpoints keep their names.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smlp.errors import UserError
from smlp.fairseq_compat.replacing import replacing
from smlp.files import copy_whole, is_held, locked, write_whole

logger = logging.getLogger(__name__)

#: names of files that a killed process left, see :func:`remove_leftovers`
_LEFTOVER = re.compile(r"checkpoint.*\.pt(\.[0-9a-f]{8})?(\.\d+)?\.tmp")


def apply() -> None:
    from fairseq import checkpoint_utils
    from fairseq.file_io import PathManager

    @replacing(checkpoint_utils, "torch_persistent_save")
    def torch_persistent_save(save: Any, obj: Any, filename: str, async_write: bool = False) -> None:
        obj = without_numpy(obj)
        if not PathManager.supports_rename(filename):
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

    @replacing(checkpoint_utils, "verify_checkpoint_directory")
    def verify_checkpoint_directory(verify_directory: Any, save_dir: str) -> None:
        try:
            verify_directory(save_dir)
        except OSError as error:
            raise UserError(f"cannot write to --save-dir {save_dir}: {error.strerror}") from error

    checkpoint_utils.PathManager = CheckpointPathManager  # only this module copies over checkpoints


def without_numpy(content: Any) -> Any:
    """Return the content of a checkpoint with numpy's numbers, which some of fairseq's metrics are, as Python's own:
    torch refuses to load others."""
    if isinstance(content, np.generic):
        return content.item()
    if type(content) in (dict, OrderedDict):
        return type(content)((key, without_numpy(value)) for key, value in content.items())
    if type(content) in (list, tuple):
        return type(content)(map(without_numpy, content))
    return content


@contextlib.contextmanager
def own_save_dir(cfg: Any, main: Callable[..., Any]) -> Iterator[None]:
    """Keep other runs out of the save-dir inside the block: they would write over each other's checkpoints.

    Rank 0 holds the lock for all ranks. Readers, and runs with ``--no-save``, need none. Nested blocks for the
    same folder do nothing.

    Args:
        cfg: fairseq's configuration, with the rank of this process.
        main: what is to run; only training writes checkpoints.

    Raises:
        UserError: another run trains there, or the folder cannot be written to.
    """
    save_dir = cfg.checkpoint.save_dir
    is_writer = _is_training(main) and not cfg.checkpoint.no_save and not cfg.distributed_training.distributed_rank
    # hydra changes the working folder from job to job
    if not is_writer or "://" in save_dir or (save_dir := os.path.join(os.getcwd(), save_dir)) in _own:
        yield
        return
    with locked(save_dir, "run", "--save-dir", ": give another one, or wait for that run to end"):
        _own.add(save_dir)
        try:
            yield
        finally:
            _own.remove(save_dir)


#: save-dirs that this process has locked
_own: set[str] = set()


def _is_training(main: Callable[..., Any]) -> bool:
    """Return whether a main function is that of fairseq-train or fairseq-hydra-train, whatever its module is called."""
    while isinstance(main, functools.partial):
        main = main.args[0]
    code = getattr(main, "__code__", None)
    return code is not None and Path(code.co_filename).stem in ("train", "hydra_train")


def save_whole(obj: Any, filename: str) -> None:
    """Write with ``torch.save`` a file that appears under its name only when it is complete and on the disk.

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


def remove_leftovers(save_dir: str | Path) -> list[Path]:
    """Delete half-written files of killed processes from a save-dir; return them.

    They are called ``checkpoint*.pt.MACHINE.PROCESS.tmp`` or, as fairseq does it, ``checkpoint*.pt.tmp``. Those that
    another process is writing, such as ``smlp checkpoint average``, stay.
    """
    removed = []
    for leftover in sorted(Path(save_dir).glob("checkpoint*.pt*.tmp")):
        if not _LEFTOVER.fullmatch(leftover.name) or is_held(leftover):
            continue
        with contextlib.suppress(OSError):
            leftover.unlink()
            removed.append(leftover)
    return removed
