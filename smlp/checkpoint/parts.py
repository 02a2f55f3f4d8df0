"""Checkpoints whose experts lie in files of their own, one for each rank that holds some.

``checkpoint_last.pt`` is then fairseq's checkpoint without expert tensors, and with an index that says which experts
are where. The parts are written first, under names that nothing else uses, and the index last: whenever a run is
killed, every index on the disk belongs to complete parts. Copies of a checkpoint (``checkpoint_best.pt``) share its
parts.

    SAVE_DIR/checkpoint_last.pt
    SAVE_DIR/experts/update_1000_5f0c/experts_0-7.pt

A part is a dictionary of ``token`` (of the saved state, so that parts of two states cannot be mixed), ``expert_ids``
and ``tensors``: by key, rows (e, ...) in the order of the ids. A key is ``model/NAME`` or ``optimizer/NAME/MOMENT``
with the parameter's name in the state dict.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from smlp.checkpoint.files import write_whole
from smlp.errors import UserError

#: of the index in a checkpoint
INDEX_KEY = "smlp_experts"
#: beside the checkpoints
PARTS_FOLDER = "experts"
_FORMAT = 1


@dataclass(frozen=True)
class Part:
    """One file of experts."""

    #: relative to the folder of the checkpoint
    file: str
    expert_ids: tuple[int, ...]
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class ExpertIndex:
    """What a checkpoint says about its experts."""

    token: str
    num_experts: int
    #: W and P of the run that wrote it; any other can read it
    world_size: int
    group_size: int
    parts: tuple[Part, ...]
    #: by key: shape of one expert's tensor, and dtype such as "float32"
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    #: parameter's position in the optimizer's state, by name
    positions: Mapping[str, int]

    def to_plain(self) -> dict[str, Any]:
        """As a dictionary of plain values."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], path: str | Path) -> ExpertIndex:
        """The inverse of :meth:`to_plain`.

        Raises:
            UserError: it was written by a newer version, or parts do not hold every expert once.
        """
        values = dict(plain)
        if values.pop("format", None) != _FORMAT:
            raise UserError(f"{path} has an index of experts in format {plain.get('format')}, known is {_FORMAT}")
        parts = tuple(Part(**{**part, "expert_ids": tuple(part["expert_ids"])}) for part in values.pop("parts"))
        tensors = {key: (tuple(shape), dtype) for key, (shape, dtype) in values.pop("tensors").items()}
        held = sorted(itertools.chain.from_iterable(part.expert_ids for part in parts))
        if held != list(range(values["num_experts"])):
            raise UserError(f"the index of {path} lists experts {held} where there are {values['num_experts']}")
        return cls(parts=parts, tensors=tensors, **values)


def new_token() -> str:
    """Random, for a state that is about to be saved."""
    return secrets.token_hex(4)


def part_file(num_updates: int, token: str, expert_ids: Sequence[int]) -> str:
    """Where experts of a state are written, relative to the folder of the checkpoint."""
    return f"{PARTS_FOLDER}/update_{num_updates}_{token}/experts_{expert_ids[0]}-{expert_ids[-1]}.pt"


class _Hashing:
    """A file that is only written to, and hashed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.num_bytes, self.hash = file, 0, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        self.num_bytes += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def write_part(
    folder: str | Path, file: str, token: str, expert_ids: Sequence[int], tensors: Mapping[str, Tensor]
) -> Part:
    """Writes a part, whole or not at all.

    Args:
        folder: of the checkpoint.
        file: from :func:`part_file`.
        token: of the state.
        expert_ids: e of them.
        tensors: by key, (e, ...).

    Raises:
        UserError: it cannot be written; the message names the file.
    """
    target = Path(folder) / file
    content = {"format": _FORMAT, "token": token, "expert_ids": list(expert_ids), "tensors": dict(tensors)}
    written = []

    def write(out: BinaryIO) -> None:
        hashing = _Hashing(out)
        torch.save(content, hashing)
        written.append(hashing)

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {target.parent}: {error.strerror}") from error
    write_whole(target, write)
    return Part(file, tuple(expert_ids), written[-1].num_bytes, written[-1].hash.hexdigest())


def describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes of one expert's tensors and dtypes, for the index."""
    return {key: (tuple(t.shape[1:]), str(t.dtype).removeprefix("torch.")) for key, t in tensors.items()}


class PartReader:
    """Reads experts of one saved state; what it has opened it keeps mapped into memory.

    Can be sent to another process, which then opens the files itself.

    Args:
        path: of the checkpoint.
        index: of its experts.

    Raises:
        UserError: a part is missing, or has another size than the index says.
    """

    def __init__(self, path: str | Path, index: ExpertIndex) -> None:
        self.path, self.index = Path(path), index
        self._opened: dict[str, dict[str, Any]] = {}
        for part in index.parts:
            self._check(part)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}

    def file(self, part: Part) -> Path:
        """Where a part is."""
        return self.path.parent / part.file

    def _check(self, part: Part) -> None:
        file = self.file(part)
        if not file.is_file():
            raise UserError(
                f"{file}, with experts {_range(part.expert_ids)} of {self.path}, is missing: a checkpoint of several "
                f"ranks moves together with its {PARTS_FOLDER}/ (smlp checkpoint merge makes one file of it)"
            )
        num_bytes = file.stat().st_size
        if num_bytes != part.num_bytes:
            raise UserError(
                f"{file}, with experts {_range(part.expert_ids)} of {self.path}, has {num_bytes:,} bytes where the "
                f"index says {part.num_bytes:,}: it is truncated, or of another checkpoint"
            )

    def open(self, part: Part) -> Mapping[str, Tensor]:
        """The tensors of a part, mapped into memory.

        Raises:
            UserError: it is damaged, or belongs to another state.
        """
        if part.file not in self._opened:
            file = self.file(part)
            try:
                content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
                found = (content["token"], tuple(content["expert_ids"]))
            except Exception as error:  # unpickling arbitrary bytes can raise anything
                raise UserError(f"{file}, of {self.path}, cannot be read ({type(error).__name__})") from error
            if found != (self.index.token, part.expert_ids):
                raise UserError(
                    f"{file} is no part of {self.path}: it holds experts {_range(found[1])} of state {found[0]}, not "
                    f"{_range(part.expert_ids)} of state {self.index.token}"
                )
            self._opened[part.file] = content["tensors"]
        return self._opened[part.file]

    def read(self, key: str, expert_ids: Iterable[int] | None = None) -> Tensor:
        """Rows of experts, all by default, in that order, (.., ...); a copy in memory."""
        shape, dtype = self.index.tensors[key]
        wanted = list(range(self.index.num_experts) if expert_ids is None else expert_ids)
        rows = torch.empty(len(wanted), *shape, dtype=getattr(torch, dtype))
        place = {expert: row for row, expert in enumerate(wanted)}
        for part in self.index.parts:
            here = [(place[expert], row) for row, expert in enumerate(part.expert_ids) if expert in place]
            if here:
                source = self.open(part)[key]
                for row, source_row in here:
                    rows[row] = source[source_row]
        return rows


@dataclass(frozen=True)
class ExpertRows:
    """Stands for an expert tensor (E, ...) in a state dict until it is known which experts are wanted."""

    reader: PartReader
    key: str

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size((self.reader.index.num_experts, *self.reader.index.tensors[self.key][0]))

    def read(self, expert_ids: Iterable[int] | None = None) -> Tensor:
        """Rows of experts, all by default."""
        return self.reader.read(self.key, expert_ids)


def read_all(state: Mapping[str, Any], expert_ids: Iterable[int] | None = None) -> dict[str, Any]:
    """A state dict with the rows of the experts wanted, all by default, in the place of :class:`ExpertRows`."""
    wanted = None if expert_ids is None else list(expert_ids)
    return {name: value.read(wanted) if isinstance(value, ExpertRows) else value for name, value in state.items()}


def attach(state: dict[str, Any], path: str | Path) -> ExpertIndex | None:
    """Puts :class:`ExpertRows` into a checkpoint's state, in place: into ``state["model"]`` and, if it has one, into
    ``state["last_optimizer_state"]["state"]``.

    Returns:
        The index, which is taken out of the state; None for a checkpoint in one file.

    Raises:
        UserError: a part is missing or truncated.
    """
    if INDEX_KEY not in state:
        return None
    index = ExpertIndex.from_plain(state.pop(INDEX_KEY), path)
    reader = PartReader(path, index)
    optimizer = (state.get("last_optimizer_state") or {}).get("state")
    for key in index.tensors:
        kind, _, name = key.partition("/")
        if kind == "model":
            state["model"][name] = ExpertRows(reader, key)
        elif optimizer is not None:
            name, _, moment = name.rpartition("/")
            optimizer.setdefault(index.positions[name], {})[moment] = ExpertRows(reader, key)
    return index


def detach(state: dict[str, Any], expert_names: Sequence[str], positions: Mapping[str, int]) -> dict[str, Tensor]:
    """Takes expert tensors out of a rank's state, in place, and returns them by key.

    The dictionaries of single parameters, which may be the optimizer's own, are replaced and not changed.

    Args:
        state: a checkpoint's, with ``"model"`` and perhaps ``"last_optimizer_state"``.
        expert_names: of expert parameters in the model.
        positions: of these parameters in the optimizer's state.
    """
    tensors = {f"model/{name}": state["model"].pop(name) for name in expert_names}
    optimizer = (state.get("last_optimizer_state") or {}).get("state", {})
    for name in expert_names:
        if positions.get(name) not in optimizer:
            continue
        of_parameter = optimizer[positions[name]]  # the optimizer's own: not to be changed
        moments = {key for key, value in of_parameter.items() if isinstance(value, Tensor) and value.dim() > 0}
        tensors |= {f"optimizer/{name}/{moment}": of_parameter[moment] for moment in sorted(moments)}
        optimizer[positions[name]] = {key: value for key, value in of_parameter.items() if key not in moments}
    return tensors


def _range(expert_ids: Sequence[int]) -> str:
    return f"{expert_ids[0]} to {expert_ids[-1]}" if len(expert_ids) > 1 else str(expert_ids[0])
