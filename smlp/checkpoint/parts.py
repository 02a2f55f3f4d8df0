"""Checkpoints whose experts are in separate files, the parts: one for each rank that holds experts.

docs/checkpoints.md describes the format. The parts are written first, under names that nothing else uses, and the file
with their index last: whenever a run is killed, every index on the disk refers to complete parts. A saved state has a
token, so that parts of two states cannot be mixed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from smlp.checkpoint.index import FORMAT, INDEX_KEY, ExpertIndex, Part, id_range, size_problem
from smlp.checkpoint.lazy import LazyTensor, joined_rows
from smlp.checkpoint.torch_file import check_records, read_structure, write_torch_file
from smlp.errors import UserError
from smlp.files import write_whole


class _Hashing:
    """A file to write to that computes the SHA-256 of what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.num_bytes, self.hash = file, 0, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        self.num_bytes += len(data)
        return self.file.write(data)

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        self.file.flush()


def write_part(
    folder: str | Path, file: str, token: str, expert_ids: Sequence[int], tensors: Mapping[str, Tensor | LazyTensor]
) -> Part:
    """Write a part piece by piece, completely or not at all.

    Args:
        folder: of the checkpoint.
        file: from :func:`part_file`.
        token: of the saved state.
        expert_ids: of the e experts in this part.
        tensors: by key, (e, ...), on any device.

    Returns:
        The entry for the index.

    Raises:
        UserError: the part cannot be written; the message names the file.
    """
    target = Path(folder) / file
    content = {"format": FORMAT, "token": token, "expert_ids": list(expert_ids), "tensors": dict(tensors)}
    written = []

    def write(out: BinaryIO) -> None:
        hashing = _Hashing(out)
        write_torch_file(hashing, content)
        written.append(hashing)

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {target.parent}: {error.strerror}") from error
    write_whole(target, write)
    return Part(file, tuple(expert_ids), written[-1].num_bytes, written[-1].hash.hexdigest())


class PartReader:
    """Reads the experts of one saved state. Opened parts are cached.

    It can be pickled: the process that receives it opens the files itself.

    Args:
        path: of the checkpoint.
        index: of its experts.
        compare: whether to compare each part with its checksums when it is opened.

    Raises:
        UserError: a part is missing, or has another size than the index says.
    """

    def __init__(self, path: str | Path, index: ExpertIndex, compare: bool = True) -> None:
        self.path, self.index, self._compare = Path(path), index, compare
        self._opened: dict[str, dict[str, LazyTensor]] = {}
        for part in index.parts:
            if problem := size_problem(self.path, part):
                raise UserError(problem)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}

    def open(self, part: Part) -> Mapping[str, LazyTensor]:
        """Return the tensors of a part by key.

        Raises:
            UserError: the part is damaged or belongs to another state.
        """
        if part.file not in self._opened:
            self._opened[part.file] = open_part(self.path, self.index, part, self._compare)
        return self._opened[part.file]

    def rows(self, key: str, expert_ids: Iterable[int] | None = None) -> LazyTensor:
        """Return the rows of some experts in the given order, or of all (E, ...)."""
        wanted = list(range(self.index.num_experts) if expert_ids is None else expert_ids)
        needed = set(wanted)
        places = {
            expert: (self.open(part)[key], row)
            for part in self.index.parts
            if not needed.isdisjoint(part.expert_ids)
            for row, expert in enumerate(part.expert_ids)
        }
        return joined_rows([places[expert] for expert in wanted])


class ExpertRows(LazyTensor):
    """An expert tensor (E, ...) whose rows are in parts. Only the parts with the wanted rows are opened."""

    def __init__(self, reader: PartReader, key: str) -> None:
        shape, dtype = reader.index.tensors[key]
        self.reader, self.key = reader, key
        self.shape, self.dtype = (reader.index.num_experts, *shape), getattr(torch, dtype)

    def rows(self, expert_ids: Iterable[int] | None = None) -> Tensor:
        """Load the rows of some experts in the given order, or of all (E, ...)."""
        return self.reader.rows(self.key, expert_ids).load()

    def read(self, start: int, stop: int) -> Tensor:
        return self._all.read(start, stop)

    def runs(self, start: int, stop: int) -> Iterator[tuple[LazyTensor, int, int]]:
        return self._all.runs(start, stop)

    @functools.cached_property
    def _all(self) -> LazyTensor:
        return self.reader.rows(self.key)


def read_all(state: Mapping[str, Any], expert_ids: Iterable[int] | None = None) -> dict[str, Any]:
    """Return a state dict with each :class:`ExpertRows` loaded: the rows of some experts, or of all."""
    wanted = None if expert_ids is None else list(expert_ids)
    return {name: value.rows(wanted) if isinstance(value, ExpertRows) else value for name, value in state.items()}


def attach(state: dict[str, Any], path: str | Path, compare: bool = True) -> PartReader | None:
    """Add an :class:`ExpertRows` for each expert tensor to a checkpoint's state, in place.

    They are added to ``state["model"]`` and, if there is one, to ``state["last_optimizer_state"]["state"]``. The index
    is removed from the state.

    Args:
        state: the content of the checkpoint's file.
        path: of the checkpoint.
        compare: whether to compare each part with its checksums when it is opened.

    Returns:
        The reader of the parts; None for a checkpoint in one file.

    Raises:
        UserError: a part is missing or truncated.
    """
    if INDEX_KEY not in state:
        return None
    index = ExpertIndex.from_plain(state.pop(INDEX_KEY), path)
    reader = PartReader(path, index, compare)
    optimizer = (state.get("last_optimizer_state") or {}).get("state")
    for key in index.tensors:
        kind, _, name = key.partition("/")
        if kind == "model":
            state["model"][name] = ExpertRows(reader, key)
        elif optimizer is not None:
            name, _, moment = name.rpartition("/")
            optimizer.setdefault(index.positions[name], {})[moment] = ExpertRows(reader, key)
    return reader


def detach(state: dict[str, Any], expert_names: Sequence[str], positions: Mapping[str, int]) -> dict[str, Tensor]:
    """Remove the expert tensors from a rank's state, in place, and return them by key.

    Args:
        state: of a checkpoint, with ``"model"`` and perhaps ``"last_optimizer_state"``.
        expert_names: names of the expert parameters in the model.
        positions: positions of these parameters in the optimizer's state, by name.
    """
    tensors = {f"model/{name}": state["model"].pop(name) for name in expert_names}
    optimizer = (state.get("last_optimizer_state") or {}).get("state", {})
    for name in expert_names:
        if positions.get(name) not in optimizer:
            continue
        of_parameter = optimizer[positions[name]]  # the optimizer's own dictionary: replace it, never change it
        moments = {key for key, value in of_parameter.items() if len(getattr(value, "shape", ())) > 0}
        tensors |= {f"optimizer/{name}/{moment}": of_parameter[moment] for moment in sorted(moments)}
        optimizer[positions[name]] = {key: value for key, value in of_parameter.items() if key not in moments}
    return tensors


def open_part(path: str | Path, index: ExpertIndex, part: Part, compare: bool = True) -> dict[str, LazyTensor]:
    """Return the tensors of a part by key.

    Args:
        path: of the checkpoint.
        index: of its experts.
        part: the part to open.
        compare: whether to compare it with its checksums.

    Raises:
        UserError: the part is damaged, belongs to another state, or its tensors are not those of the index.
    """
    file = Path(path).parent / part.file
    try:
        if compare:
            check_records(file)
        content = read_structure(file)
        found = (content["token"], tuple(content["expert_ids"]))
        tensors = content["tensors"]
        here = {key: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for key, t in tensors.items()}
    except UserError as error:
        raise UserError(f"{error} (experts {part.experts()} of {path})") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{file}, of {path}, cannot be read ({type(error).__name__})") from error
    if found != (index.token, part.expert_ids):
        raise UserError(
            f"{file} is not a part of {path}: it holds experts {id_range(found[1])} of state {found[0]}, not "
            f"{part.experts()} of state {index.token}"
        )
    rows = (len(part.expert_ids),)
    wanted = {key: ((*rows, *shape), dtype) for key, (shape, dtype) in index.tensors.items()}
    for key in sorted(here.keys() | wanted.keys()):
        if here.get(key) != wanted.get(key):
            raise UserError(
                f"{file}, of {path}, has {_describe(here.get(key))} as {key} where the index says "
                f"{_describe(wanted.get(key))}"
            )
    return tensors


def _describe(tensor: tuple[tuple[int, ...], str] | None) -> str:
    return "nothing" if tensor is None else f"{tensor[1]} {tensor[0]}"
