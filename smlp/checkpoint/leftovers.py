"""Parts that no checkpoint refers to any more."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from smlp.checkpoint.index import INDEX_KEY, PARTS_FOLDER
from smlp.checkpoint.torch_file import read_structure

logger = logging.getLogger(__name__)


def remove_unused_parts(save_dir: str | Path) -> list[Path]:
    """Deletes the parts of saved states of which no ``*.pt`` file beside them has an index: those of checkpoints that
    were deleted or written over, and of a run that was killed while it saved.

    If a file cannot be read, nothing is deleted.

    Returns:
        The folders deleted.
    """
    save_dir = Path(save_dir)
    present = {folder for folder in (save_dir / PARTS_FOLDER).glob("update_*") if folder.is_dir()}
    if not present:
        return []
    used = set()
    for checkpoint in save_dir.glob("*.pt"):
        try:
            used |= _folders(checkpoint)
        except Exception as error:  # unpickling arbitrary bytes can raise anything
            logger.warning(f"unused experts are kept: {checkpoint} cannot be read ({type(error).__name__})")
            return []
    removed = sorted(present - used)
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
    return removed


def _folders(checkpoint: Path) -> set[Path]:
    """Where the parts of a checkpoint are."""
    state = read_structure(checkpoint)  # which notices a damaged index, where torch.load would take its word
    index = state.get(INDEX_KEY) if isinstance(state, dict) else None
    return {(checkpoint.parent / part["file"]).parent for part in index["parts"]} if index else set()
