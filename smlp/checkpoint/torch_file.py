"""Files of ``torch.save`` and ``torch.load``, read and written piece by piece.

Such a file is a zip archive that compresses nothing: ``data.pkl`` holds the objects, a tensor in it being a reference
to a record ``data/N``, which holds its memory. Here the references become :class:`~smlp.checkpoint.lazy.LazyTensor`.
"""

from __future__ import annotations

import argparse
import collections
import errno
import io
import math
import pickle
import struct
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from smlp.checkpoint.lazy import PIECE_BYTES, FileVersion, HeldTensor, LazyTensor, StoredTensor, as_bytes
from smlp.errors import UserError
from smlp.files import regular_file

_FOLDER = "archive"
_ALIGNMENT = 64  # of tensors in the file, so that they can be used where they lie when it is mapped into memory
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip record: at the end, the lengths of its name and of its extra field
_ZIP64_EXTRA = 20  # bytes that zipfile adds to the header of a large record
_PADDING_ID = 0x4246  # of the extra field with which torch, too, aligns records
_MOST_VALUES = 10_000_000  # in the content of a file, counted where they are used: lists may hold one list many times
_STORAGES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}
_DTYPES = {name: dtype for dtype, name in _STORAGES.items()}
_PLAIN = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("argparse", "Namespace"): argparse.Namespace,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
}


class OtherClassError(UserError):
    """A file holds objects of a class that is no plain value and no tensor."""


class _Refused(Exception):
    """What no file of ``torch.save`` holds."""


class _OtherClass(Exception):
    """A class or function in a file that is not a plain value."""


class _Storage(NamedTuple):
    """A record, when it is read."""

    record: str
    dtype: torch.dtype


@dataclass(frozen=True)
class _Reference:
    """The same when it is written."""

    key: str
    dtype: torch.dtype
    numel: int


def existing_file(path: str | Path) -> Path:
    """The path of a checkpoint that is there and may be read.

    Raises:
        UserError: it is not, or it is a folder, a named pipe or a device.
    """
    return regular_file(path, "checkpoint")


def read_structure(path: str | Path) -> Any:
    """The content of a file, with a lazy tensor in the place of each tensor; plain values only.

    Memory is only taken in proportion to the size of the file: records are not compressed, a tensor lies within its
    record, and values that are named many times are counted many times.

    Raises:
        OtherClassError: it holds objects of other classes.
        UserError: it is missing, truncated or no such file; the message names it.
    """
    path = existing_file(path)
    try:
        version = FileVersion.of(path)
        with zipfile.ZipFile(path) as archive:
            records = {info.filename.partition("/")[2]: info for info in _stored_records(archive, path)}
            if "byteorder" in records and archive.read(records["byteorder"]).decode() != sys.byteorder:
                raise _Refused("numbers in the byte order of another kind of machine")
            content = _Reader(archive.read(records["data.pkl"]), version, _Records(path, records)).load()
        _count_values(content, {})
        return content
    except _OtherClass as refused:
        raise OtherClassError(f"{path} holds {refused}, which is not read") from None
    except _Refused as refused:
        raise UserError(f"{path} holds {refused}, which is not read") from None
    except Exception as error:  # unpickling arbitrary bytes can raise anything
        raise UserError(unreadable(path, error)) from error


def _stored_records(archive: zipfile.ZipFile, path: Path) -> list[zipfile.ZipInfo]:
    """The records of an archive, none of which takes more memory than its part of the file."""
    records = archive.infolist()
    if any(info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size for info in records):
        raise _Refused("compressed records")
    if sum(info.file_size for info in records) > path.stat().st_size:
        raise _Refused("records that are larger than the file")
    return records


def _count_values(content: Any, counted: dict[int, int]) -> int:
    """The number of values that a walk through nested dictionaries and sequences would meet."""
    if not isinstance(content, (Mapping, list, tuple, set, argparse.Namespace)):
        return 1
    if id(content) not in counted:
        counted[id(content)] = _MOST_VALUES  # until it is known: content that holds itself is refused
        held = vars(content) if isinstance(content, argparse.Namespace) else content
        inner = [*held.keys(), *held.values()] if isinstance(held, Mapping) else held
        total = 1 + sum(_count_values(value, counted) for value in inner)
        if total > _MOST_VALUES:
            raise _Refused(f"more than {_MOST_VALUES:,} values")
        counted[id(content)] = total
    return counted[id(content)]


class _Records:
    """Where the bytes of a record begin, and how many they are."""

    def __init__(self, path: Path, records: dict[str, zipfile.ZipInfo]) -> None:
        self._path, self._records = path, records

    def begin_of(self, record: str) -> int:
        info = self._records[record]
        with open(self._path, "rb") as file:
            file.seek(info.header_offset)
            header = file.read(_LOCAL_HEADER.size)
        return info.header_offset + len(header) + sum(_LOCAL_HEADER.unpack(header))

    def size_of(self, record: str) -> int:
        return self._records[record].file_size


class _Reader(pickle._Unpickler):  # the one in C takes as much memory for its table as a file asks for
    """Makes plain values and lazy tensors, and nothing else."""

    def __init__(self, data: bytes, version: FileVersion, records: _Records) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._version, self._records = version, records

    def persistent_load(self, reference: tuple) -> _Storage:
        kind, dtype, key, _location, _numel = reference
        assert kind == "storage"
        return _Storage(f"data/{key}", dtype)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return self._tensor
        if module == "torch._utils" and name == "_rebuild_parameter":
            return lambda tensor, *_: tensor
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise _OtherClass(f"{module}.{name}")

    def _tensor(self, storage: _Storage, start: int, shape: Sequence[int], stride: Sequence[int], *_: Any) -> Any:
        shape, stride = tuple(shape), tuple(stride)
        numbers, itemsize = (start, *shape, *stride), storage.dtype.itemsize
        if len(shape) != len(stride) or not all(type(number) is int and number >= 0 for number in numbers):
            raise _Refused("a tensor without a shape")
        numel = math.prod(shape)
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if numel else 0
        held = self._records.size_of(storage.record)
        # a small tensor may be one number that is repeated
        if (start + span) * itemsize > held or numel * itemsize > max(held, PIECE_BYTES):
            raise _Refused(f"a tensor of shape {shape} in a record of {held:,} bytes")
        offset = self._records.begin_of(storage.record) + start * itemsize
        if stride == _contiguous(shape) or numel == 0 or all(size == 1 for size in shape):
            return StoredTensor(self._version, offset, storage.dtype, shape)
        flat = StoredTensor(self._version, offset, storage.dtype, (span,)).load()
        return HeldTensor(flat.as_strided(shape, stride))


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class _Writer(pickle.Pickler):
    """Puts references in the place of tensors, and remembers them."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=2)
        self.tensors: list[LazyTensor] = []
        # Equal stored tensors are one: two names of one tensor. The others are told apart by identity.
        self._numbers: dict[Any, int] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            value = HeldTensor(value)
        if not isinstance(value, LazyTensor):
            return NotImplemented
        number = self._numbers.setdefault(value, len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        storage = _Reference(str(number), value.dtype, value.numel)
        strides = _contiguous(value.shape)
        arguments = (storage, 0, value.shape, strides, False, collections.OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments

    def persistent_id(self, value: Any) -> tuple | None:
        if not isinstance(value, _Reference):
            return None
        return "storage", getattr(torch, _STORAGES[value.dtype]), value.key, "cpu", value.numel


def write_torch_file(file: BinaryIO, content: Any) -> None:
    """Writes what ``torch.load`` reads (also with ``mmap=True`` and ``weights_only=True``), piece by piece.

    Args:
        file: to write to; it need not be able to seek.
        content: plain values with tensors, lazy or in memory, of any device; they are loaded to the CPU.
    """
    buffer = io.BytesIO()
    pickler = _Writer(buffer)
    pickler.dump(content)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{_FOLDER}/data.pkl", buffer.getvalue())
        archive.writestr(f"{_FOLDER}/byteorder", sys.byteorder)
        for number, tensor in enumerate(pickler.tensors):
            record = zipfile.ZipInfo(f"{_FOLDER}/data/{number}")
            record.file_size = tensor.num_bytes
            record.extra = _padding(archive, record)
            with archive.open(record, "w") as out:
                for piece in tensor.pieces():
                    out.write(as_bytes(piece))
        archive.writestr(f"{_FOLDER}/version", "3\n")


def _padding(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bytes:
    """An extra field after which the bytes of a record are aligned."""
    is_large = record.file_size * 1.05 > zipfile.ZIP64_LIMIT  # as zipfile decides it
    header = _LOCAL_HEADER.size + len(record.filename) + (_ZIP64_EXTRA if is_large else 0)
    begin = archive.fp.tell() + header + 4  # of the field itself
    size = -begin % _ALIGNMENT
    return struct.pack("<HH", _PADDING_ID, size) + bytes(size)


def named_tensors(content: Any, name: str = "") -> Iterator[tuple[str, LazyTensor]]:
    """The lazy tensors in nested dictionaries and sequences, named by the keys on the way."""
    if isinstance(content, LazyTensor):
        yield name, content
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(content, Mapping):
        items = content.items()
    elif isinstance(content, (list, tuple)):
        items = enumerate(content)
    for key, value in items:
        yield from named_tensors(value, f"{name}/{key}" if name else str(key))


def unreadable(path: Path, error: Exception) -> str:
    """The sentence for a file of which reading failed."""
    if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which is a place outside the file
        return f"cannot read {path}: {error.strerror or error}"
    reason = (str(error).splitlines() or [""])[0]
    return (
        f"{path} ({path.stat().st_size:,} bytes) is truncated or is no checkpoint: it cannot be read "
        f"({type(error).__name__}: {reason})"
    )
