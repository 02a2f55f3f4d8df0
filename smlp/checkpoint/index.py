"""The index of a checkpoint in parts, which says which files hold its experts; and the removal of unused parts.

:mod:`smlp.checkpoint.parts` describes the format.
"""

from __future__ import annotations

import collections
import itertools
import logging
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from smlp.checkpoint.torch_file import read_structure
from smlp.errors import UserError
from smlp.files import is_missing, name_below, regular_file

logger = logging.getLogger(__name__)

#: key of the index in a checkpoint
INDEX_KEY = "smlp_experts"
#: folder of the parts, in the folder of the checkpoints
PARTS_FOLDER = "experts"
FORMAT = 1
_SHOWN = 64  # most experts listed in a message


@dataclass(frozen=True)
class Part:
    """One file of experts."""

    #: relative to the folder of the checkpoint
    file: str
    expert_ids: tuple[int, ...]
    num_bytes: int
    sha256: str

    def experts(self) -> str:
        """Return the ids in words."""
        return id_range(self.expert_ids)


@dataclass(frozen=True)
class ExpertIndex:
    """The files of a checkpoint's experts and what is in them."""

    token: str
    num_experts: int
    #: W and P of the run that wrote it; a run with other values can read it
    world_size: int
    group_size: int
    parts: tuple[Part, ...]
    #: shape of one expert's tensor and its dtype such as "float32", by key
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    #: position in the optimizer's state, by parameter name
    positions: Mapping[str, int]

    def to_plain(self) -> dict[str, Any]:
        """Return a dictionary of plain values."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], path: str | Path) -> ExpertIndex:
        """Return the index from a dictionary that :meth:`to_plain` made.

        Raises:
            UserError: it was written by a newer version, is damaged, or does not list every expert exactly once.
        """
        values = dict(plain) if isinstance(plain, Mapping) else {}
        if not values:
            raise UserError(f"the index of experts in {path} is damaged: it is {plain!r:.60}")
        if values.pop("format", None) != FORMAT:
            raise UserError(
                f"{path} has an index of experts in format {plain.get('format')}, this version reads {FORMAT}"
            )
        try:
            parts = tuple(Part(**{**part, "expert_ids": tuple(part["expert_ids"])}) for part in values.pop("parts"))
            tensors = {key: (tuple(shape), dtype) for key, (shape, dtype) in values.pop("tensors").items()}
            index = cls(parts=parts, tensors=tensors, **values)
            problem = _problem(index)
            held = sorted(itertools.chain.from_iterable(part.expert_ids for part in parts))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"the index of experts in {path} is damaged ({type(error).__name__}: {error})") from error
        if problem is not None:
            raise UserError(f"the index of experts in {path} is damaged: {problem}")
        for part in parts:
            if not name_below(part.file, f"the index of experts in {path}").startswith(f"{PARTS_FOLDER}/"):
                raise UserError(f"the index of experts in {path} names {part.file}, which is not in {PARTS_FOLDER}/")
        for file, count in collections.Counter(str(PurePosixPath(part.file)) for part in parts).items():
            if count > 1:
                raise UserError(f"the index of experts in {path} names {file} for {count} parts")
        # a damaged index may hold any num_experts, so no list of that length is made
        if held != list(range(len(held))) or len(held) != index.num_experts:
            listed = f"experts {held}" if len(held) <= _SHOWN else f"{len(held)} experts"
            raise UserError(f"the index of {path} lists {listed}, but there are {index.num_experts}")
        return index


def _problem(index: ExpertIndex) -> str | None:
    """Return why an index cannot be used, or None."""
    sizes = (index.num_experts, index.world_size, index.group_size, *(part.num_bytes for part in index.parts))
    sizes += tuple(itertools.chain.from_iterable(shape for shape, _ in index.tensors.values()))
    if not all(type(size) is int and size >= 0 for size in sizes):
        return "its sizes are not whole numbers"
    if not isinstance(index.token, str):
        return "its token is not text"
    if not all(type(place) is int for place in index.positions.values()):
        return "its positions are not whole numbers"
    for key, (_, dtype) in index.tensors.items():
        kind, _, name = key.partition("/")
        if kind not in ("model", "optimizer") or not isinstance(getattr(torch, dtype, None), torch.dtype):
            return f"it has a tensor {key} of type {dtype}"
        if kind == "optimizer" and name.rpartition("/")[0] not in index.positions:
            return f"it has no position for {key}"
    return None


def new_token() -> str:
    """Return a random token for a state that is about to be saved."""
    return secrets.token_hex(4)


def part_file(num_updates: int, token: str, expert_ids: Sequence[int]) -> str:
    """Return the name of a part, relative to the folder of the checkpoint."""
    return f"{PARTS_FOLDER}/update_{num_updates}_{token}/experts_{expert_ids[0]}-{expert_ids[-1]}.pt"


def describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape of one expert's tensor and the dtype of each tensor (e, ...), for the index."""
    return {key: (tuple(t.shape[1:]), str(t.dtype).removeprefix("torch.")) for key, t in tensors.items()}


def id_range(expert_ids: Sequence[int]) -> str:
    """Return expert ids in words."""
    if not expert_ids:
        return "none"
    return f"{expert_ids[0]} to {expert_ids[-1]}" if len(expert_ids) > 1 else str(expert_ids[0])


def size_problem(path: str | Path, part: Part) -> str | None:
    """Return the error message for a part that is missing or whose size differs from the index; else None."""
    file = Path(path).parent / part.file
    if is_missing(file):
        return (
            f"{file}, with experts {part.experts()} of {path}, is missing: move a checkpoint of several ranks "
            f"together with its folder {PARTS_FOLDER}/ (smlp checkpoint merge makes one file of it)"
        )
    try:
        regular_file(file)
    except UserError as error:
        return f"{error} (experts {part.experts()} of {path})"
    num_bytes = file.stat().st_size
    if num_bytes != part.num_bytes:
        return (
            f"{file}, with experts {part.experts()} of {path}, has {num_bytes:,} bytes where the index says "
            f"{part.num_bytes:,}: it is truncated, or belongs to another checkpoint"
        )
    return None


def remove_unused_parts(save_dir: str | Path, among: set[Path] | None = None) -> None:
    """Delete the parts that no checkpoint (``*.pt``) in a folder refers to.

    They belong to checkpoints that were deleted or overwritten, or to a run that was killed while it saved. If any
    checkpoint cannot be read, or the folder of the parts is a link, nothing is deleted.

    Args:
        save_dir: the folder.
        among: delete no others than these, such as :func:`folders_of_parts` of a checkpoint that was written over.
    """
    save_dir = Path(save_dir)
    present = {folder for folder in (save_dir / PARTS_FOLDER).glob("update_*") if folder.is_dir()}
    if among is not None:  # an index may name any folder, so those outside are left
        present &= among
    if not present:
        return
    if (save_dir / PARTS_FOLDER).is_symlink():
        logger.warning(f"unused files of experts are kept: {save_dir / PARTS_FOLDER} is a link, others may use them")
        return
    used = set()
    for checkpoint in save_dir.glob("*.pt"):
        try:
            used |= folders_of_parts(checkpoint)
        except Exception as error:  # unpickling arbitrary bytes can raise anything
            logger.warning(f"unused files of experts are kept: {checkpoint} cannot be read ({type(error).__name__})")
            return
    for folder in sorted(present - used):
        shutil.rmtree(folder, ignore_errors=True)


def folders_of_parts(checkpoint: Path) -> set[Path]:
    """Return the folders that hold the parts of a checkpoint."""
    state = read_structure(checkpoint)  # torch.load would not notice a damaged index
    index = state.get(INDEX_KEY) if isinstance(state, dict) else None
    return {(checkpoint.parent / part["file"]).parent for part in index["parts"]} if index else set()
