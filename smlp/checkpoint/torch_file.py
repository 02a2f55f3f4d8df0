"""Read, write and verify files of ``torch.save`` piece by piece.

Such a file is an uncompressed zip archive. ``data.pkl`` holds the pickled objects; a tensor in it is a reference to a
record ``data/N``, which holds the tensor's memory. Here these references become
:class:`~smlp.checkpoint.lazy.LazyTensor`.

``torch.load`` is not used because it does not bound memory: mapped pages of every tensor that was read stay resident, a
compressed or a crafted file takes far more memory than its size (``bytearray(5 * 10**8)`` fits in a file of 1 kB), and
a mapped file that is truncated while it is read kills the process (SIGBUS).

Each record has a CRC-32, which torch does not compare: a bit that flipped on a disk or in a transfer would be trained
on. Comparing reads the file a second time; ``SMLP_VERIFY_CHECKPOINTS=0`` skips it.
"""

from __future__ import annotations

import argparse
import collections
import errno
import io
import math
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor

from smlp.checkpoint.lazy import DTYPES, PIECE_BYTES, FileVersion, HeldTensor, LazyTensor, StoredTensor, as_bytes
from smlp.errors import UserError
from smlp.files import regular_file

VARIABLE = "SMLP_VERIFY_CHECKPOINTS"
_SHOWN = 3  # most tensors named in a message
_IS_FOLDER = 0x10  # attribute bit that marks a folder for MS-DOS and torch
_FOLDER = "archive"
_ALIGNMENT = 64  # of tensors in the file, in bytes; a memory-mapped file can then be used in place
_OLD_FORMAT = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")  # how files of torch.save began before 1.6
_LOCAL_HEADER = struct.Struct("<26xHH")  # header of a zip record; it ends in the lengths of name and extra field
_ZIP64_EXTRA = 20  # bytes that zipfile adds to the header of a large record
_PADDING_ID = 0x4246  # extra field with which torch also aligns records
_MOST_VALUES = 10_000_000  # most values in a file; a list that is referenced twice counts twice
_MOST_BITS = 1024  # of a whole number
_MOST_DIMS = 64  # of a tensor, as in torch
_ROOM = 8  # bytes that may be made from one byte of the file by calling classes, or by views of its records
_LARGE = 1 << 31  # whole numbers as keys of dictionaries, see :meth:`_Reader._key`
_MOST_ODD_KEYS = 5000  # that are neither text nor smaller numbers
_WITHOUT_MEMORY = ("torch._utils._rebuild_", "torch.serialization._get_layout")  # of other kinds of tensors
_CODED = ("latin1", "latin-1")  # how bytes become text in older formats of pickle
_STORAGES = {
    dtype: f"{kind}Storage"
    for dtype, kind in zip(
        DTYPES, ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"), strict=True
    )
}
_DTYPES = {name: dtype for dtype, name in _STORAGES.items()}
_PLAIN = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "Counter"): collections.Counter,
    ("argparse", "Namespace"): argparse.Namespace,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
}
_EMPTY = collections.OrderedDict, collections.defaultdict, argparse.Namespace  # their content follows


class OtherClassError(UserError):
    """Raised for a file that holds objects of other classes than tensors and plain values."""


class _Refused(Exception):
    """Raised for content that ``torch.save`` does not write."""


class _OtherClass(Exception):
    """Raised for a class or function that is no plain value."""


@dataclass(frozen=True)
class _Foreign:
    """Stands for an object of another class, of which nothing is made."""

    name: str


@dataclass(frozen=True)
class _Storage:
    """A record with the elements of tensors, as the pickled content refers to it."""

    key: str
    dtype: torch.dtype
    numel: int


def existing_file(path: str | Path) -> Path:
    """Return the path of a checkpoint, if it is a regular file that may be read.

    Raises:
        UserError: it is missing, unreadable, a folder, a named pipe or a device.
    """
    folder = Path(path) if isinstance(path, str | Path) else None
    # unlike Path.is_file, it takes what cannot be looked at for absent: regular_file says why it cannot be read
    if folder and os.path.isfile(folder / "config.json") and any(folder.glob("*.safetensors")):
        raise UserError(of_transformers(folder))
    return regular_file(path, "checkpoint")


def of_transformers(folder: str | Path) -> str:
    """Return the sentence about a folder that transformers saved, given in place of a checkpoint."""
    return (
        f"{folder} is a folder of transformers, as smlp export --hf writes: smlp checkpoint import {folder} -o "
        "CHECKPOINT.pt makes a checkpoint of it"
    )


def read_structure(path: str | Path) -> Any:
    """Return the content of a file: plain values, with a lazy tensor in place of each tensor.

    No code in the file is run. Memory is bounded by the size of the file: compressed records, tensors that reach beyond
    their record and values that are referred to very often are refused.

    Raises:
        OtherClassError: it holds objects of other classes.
        UserError: it is missing, truncated or not a file of ``torch.save``; the message names it.
    """
    path = existing_file(path)
    try:
        version = FileVersion.of(path)
        with zipfile.ZipFile(path) as archive:
            records = {info.filename.partition("/")[2]: info for info in _stored_records(archive, path)}
            if "byteorder" in records and archive.read(records["byteorder"]).decode() != sys.byteorder:
                raise _Refused("numbers in the byte order of another kind of machine")
            reader = _Reader(archive.read(records["data.pkl"]), version, records)
            content = reader.load()
        _count_values(content, {})
        if reader.foreign is not None:
            raise _OtherClass(reader.foreign.name)
        return content
    except _OtherClass as refused:
        raise OtherClassError(f"{path} holds {refused}, which is not read") from None
    except _Refused as refused:
        raise UserError(f"{path} holds {refused}, which is not read") from None
    except Exception as error:  # unpickling arbitrary bytes can raise anything
        raise UserError(unreadable(path, error)) from error


def _stored_records(archive: zipfile.ZipFile, path: Path) -> list[zipfile.ZipInfo]:
    """Return the records of an archive, which must be uncompressed and fit into the file."""
    records = archive.infolist()
    if any(info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size for info in records):
        raise _Refused("compressed records")
    if sum(info.file_size for info in records) > path.stat().st_size:
        raise _Refused("records that are larger than the file")
    if len({info.filename.partition("/")[2] for info in records}) < len(records):  # torch would read the other one
        raise _Refused("two records of one name")
    return records


def _count_values(content: Any, counted: dict[int, int]) -> int:
    """Return the number of values in nested dictionaries and sequences; shared ones count each time.

    Each character of a text and each byte of a whole number counts, as they become text in a ``.safetensors`` file.
    """
    if not isinstance(content, (Mapping, list, tuple, set, frozenset, argparse.Namespace)):
        if isinstance(content, int):
            if content.bit_length() > _MOST_BITS:
                raise _Refused(f"a number of more than {_MOST_BITS:,} bits")
            return 1 + content.bit_length() // 8
        return 1 + len(content) if isinstance(content, (str, bytes)) else 1
    if id(content) not in counted:
        counted[id(content)] = _MOST_VALUES  # until the count is known: content that contains itself is refused
        held = vars(content) if isinstance(content, argparse.Namespace) else content
        inner = [*held.keys(), *held.values()] if isinstance(held, Mapping) else [*held]
        inner += vars(content).values() if isinstance(content, collections.OrderedDict) else ()
        total = 1 + sum(_count_values(value, counted) for value in inner)
        if total > _MOST_VALUES:
            raise _Refused(f"more than {_MOST_VALUES:,} values")
        counted[id(content)] = total
    return counted[id(content)]


def check_values(content: Any, path: str | Path) -> None:
    """Refuse content from another format that a checkpoint would not be read with.

    Raises:
        UserError: there are too many values, or numbers that are too large.
    """
    try:
        _count_values(content, {})
    except _Refused as refused:
        raise UserError(f"{path} holds {refused}, which is not read") from None


class _Reader(pickle._Unpickler):  # the C version allocates a memo as large as the file demands
    """An unpickler that makes plain values and lazy tensors, and nothing else.

    Pickle can call anything with anything, and set attributes of what exists already. Here, classes are called only as
    ``torch.save`` calls them, with arguments no larger than the file, and only a namespace is given attributes. What
    other classes would make is left out, so that the rest of the file is looked at too.
    """

    def __init__(self, data: bytes, version: FileVersion, records: Mapping[str, zipfile.ZipInfo]) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._version, self._records = version, records
        self._room = _ROOM * len(data)
        self._room_of_views = self._largest = _ROOM * version.stamp[1] + 16 * PIECE_BYTES
        self._flat: dict[StoredTensor, Tensor | None] = {}
        self._held: dict[Any, HeldTensor] = {}
        self._seen: set[Any] = set()
        self._odd_keys = _MOST_ODD_KEYS
        #: the first object of another class
        self.foreign: _Foreign | None = None

    def persistent_load(self, reference: tuple) -> Any:
        kind, dtype, key, _location, numel = reference
        if isinstance(dtype, _Foreign):
            return dtype
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(key) is not str or type(numel) is not int:
            raise _Refused("a tensor without a record")
        return _Storage(key, dtype, numel)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *_: tensor
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("builtins", "__builtin__") and name == "set":
            return set
        if (module, name) == ("_codecs", "encode"):
            return _bytes_of
        if name == "bytearray":  # torch would make one of any size
            raise _Refused(f"{module}.{name}")
        found = _Foreign(f"{module}.{name}")
        self.foreign = self.foreign or found
        return found

    def _call(self, made: Any, arguments: tuple) -> Any:
        """Return what a class or function makes of arguments, which together may not be larger than the file."""
        other = next((value for value in arguments if isinstance(value, _Foreign)), None)
        is_torchs = isinstance(made, _Foreign) and made.name.startswith("torch.")
        if len(arguments) > 2 and (is_torchs or (other and made == self._tensor)):
            shape = arguments[2]  # of a tensor of another kind
            if type(shape) is tuple and all(type(size) is int for size in shape) and _product(shape) > self._largest:
                raise _Refused(f"a tensor of shape {shape} in a file of {self._version.stamp[1]:,} bytes")
        if isinstance(made, _Foreign):
            if is_torchs and not made.name.startswith(_WITHOUT_MEMORY):
                raise _Refused(made.name)  # torch would make a tensor of any size
            return made
        if other:
            return other
        self._spend(sum(len(value) for value in arguments if isinstance(value, Collection)))
        if made is set:
            return set(map(self._key, *arguments))
        has_pairs = len(arguments) > (made is collections.defaultdict)  # whose keys nobody would look at
        if has_pairs and (made in _EMPTY or (made is collections.Counter and type(arguments[0]) is not dict)):
            raise _Refused(f"a {made.__name__} of something")
        return made(*arguments)

    def _reduce_with_names(self) -> None:
        self.stack.pop()  # arguments by name, which only other classes have
        if not isinstance(self.stack[-2], _Foreign):
            raise _Refused("a call with names")
        self._reduce()

    def _spend(self, count: int) -> None:
        """Count values that are read once more, which takes time that no byte of the file stands for."""
        self._room -= count
        if self._room < 0:
            raise _Refused("values that are referred to too often")

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], arguments)

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, _Foreign):
            return
        self._spend(len(state) if isinstance(state, dict) else 1)
        if type(made) is argparse.Namespace and type(state) is dict and all(type(name) is str for name in state):
            vars(made).update(state)
        elif type(made) is collections.OrderedDict and type(state) is dict and state.keys() <= {"_metadata"}:
            vars(made).update(state)  # versions of the modules of a state dict
        else:
            raise _Refused("an object with attributes")

    def _set_items(self, items: Sequence[Any]) -> None:
        if isinstance(self.stack[-1], _Foreign):
            return
        if not isinstance(self.stack[-1], dict):
            raise _Refused("items of something else than a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][self._key(key)] = value

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _make_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set_items(items)

    def _extend(self, values: Sequence[Any]) -> None:
        if isinstance(self.stack[-1], _Foreign):
            return
        if type(self.stack[-1]) is not list:
            raise _Refused("values appended to something else than a list")
        self.stack[-1].extend(values)

    def _add_to_set(self) -> None:
        values = self.pop_mark()
        if isinstance(self.stack[-1], _Foreign):
            return
        if type(self.stack[-1]) is not set:
            raise _Refused("values added to something else than a set")
        self.stack[-1].update(map(self._key, values))

    def _key(self, value: Any) -> Any:
        """Return a key of a dictionary, or an item of a set.

        Of large numbers and of tuples, many can be chosen that Python's tables do not tell apart, so that n of them
        take n² steps. A file may have few of these.
        """
        if isinstance(value, (str, bytes)) or value is None or (isinstance(value, int) and abs(value) < _LARGE):
            return value
        parts = value if type(value) is tuple else (value,)  # of nested ones, Python could not compute a hash
        self._spend(len(parts))
        if any(isinstance(part, int) and part.bit_length() > _MOST_BITS for part in parts):
            raise _Refused(f"a number of more than {_MOST_BITS:,} bits")
        if not all(isinstance(part, (str, bytes, int, float, _Foreign, type(None))) for part in parts):
            raise _Refused(f"a {type(value).__name__} as a key")
        self._odd_keys -= not isinstance(value, _Foreign)
        if self._odd_keys < 0:
            raise _Refused(f"more than {_MOST_ODD_KEYS:,} keys that are large numbers or no text")
        return value

    def _make_frozenset(self) -> None:
        values = self.pop_mark()
        self.append(frozenset(map(self._key, values)))

    def _refuse(self) -> None:
        raise _Refused("an instruction that torch.save does not write")

    dispatch: ClassVar = {
        **pickle._Unpickler.dispatch,
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _reduce,  # class.__new__(class, *arguments): for plain classes, the same
        pickle.NEWOBJ_EX[0]: _reduce_with_names,
        pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: lambda self: self._set_items(self.pop_mark()),
        pickle.DICT[0]: _make_dict,
        pickle.APPEND[0]: lambda self: self._extend([self.stack.pop()]),
        pickle.APPENDS[0]: lambda self: self._extend(self.pop_mark()),
        pickle.ADDITEMS[0]: _add_to_set,
        pickle.FROZENSET[0]: _make_frozenset,
        **dict.fromkeys((pickle.PERSID[0], pickle.INST[0], pickle.OBJ[0]), _refuse),
        **dict.fromkeys((pickle.EXT1[0], pickle.EXT2[0], pickle.EXT4[0], pickle.BYTEARRAY8[0]), _refuse),
    }

    def _tensor(self, storage: _Storage, start: int, shape: Sequence[int], stride: Sequence[int], *_: Any) -> Any:
        if not isinstance(storage, _Storage) or len(shape) != len(stride) or len(shape) > _MOST_DIMS:
            raise _Refused("a tensor without a shape")
        shape, stride = tuple(shape), tuple(stride)
        numbers, itemsize = (start, *shape, *stride), storage.dtype.itemsize
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
            raise _Refused("a tensor without a shape")
        numel = math.prod(shape)
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if numel else 0
        record = self._records[f"data/{storage.key}"]
        held = record.file_size
        # an expanded tensor has more elements than its record; torch.save writes it, but only small ones are accepted
        if (start + span) * itemsize > held or numel * itemsize > max(held, PIECE_BYTES):
            raise _Refused(f"a tensor of shape {shape} in a record of {held:,} bytes")
        offset = self._begin_of(record) + start * itemsize
        view = storage, start, shape, stride
        if view not in self._seen:
            self._seen.add(view)
            self._load(max(numel, span) * itemsize)
        if numel == 0 or stride == _contiguous(shape) or all(size == 1 for size in shape):
            return StoredTensor(self._version, offset, storage.dtype, shape)
        if view not in self._held:  # a record is loaded at most twice in a type, however many views the file has
            source = StoredTensor(self._version, self._begin_of(record), storage.dtype, (held // itemsize,))
            if source not in self._flat:  # of the first view only what it spans: there are mostly no others
                flat = StoredTensor(self._version, offset, storage.dtype, (span,)).load()
                self._flat[source], self._held[view] = None, HeldTensor(flat.as_strided(shape, stride))
                return self._held[view]
            if self._flat[source] is None:
                self._load(held)
                self._flat[source] = source.load()
            flat = self._flat[source]
            self._held[view] = HeldTensor(flat.as_strided(shape, stride, start))
        return self._held[view]

    def _load(self, num_bytes: int) -> None:
        """Count bytes of tensors, which may lie in the same records."""
        self._room_of_views -= num_bytes
        if self._room_of_views < 0:
            raise _Refused("too many tensors in the same records")

    def _begin_of(self, record: zipfile.ZipInfo) -> int:
        """Return the offset in the file at which the bytes of a record begin."""
        with open(self._version.path, "rb") as file:
            file.seek(record.header_offset)
            header = file.read(_LOCAL_HEADER.size)
        return record.header_offset + len(header) + sum(_LOCAL_HEADER.unpack(header))


def _product(sizes: tuple[int, ...]) -> int:
    """Return the product of sizes, up to 64 of which may be large."""
    return math.prod(sizes[:_MOST_DIMS]) if all(0 <= size < 1 << 63 for size in sizes[:_MOST_DIMS]) else 0


def _bytes_of(text: str, coding: str) -> bytes:
    """Return bytes that were written as text."""
    if type(text) is not str or coding not in _CODED:
        raise _Refused("text in an encoding")
    return text.encode("latin-1")


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


class _Writer(pickle.Pickler):
    """A pickler that puts references in place of tensors and collects the tensors."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=2)
        self.tensors: list[LazyTensor] = []
        # Equal StoredTensors are the same tensor, which is written once. Other tensors are compared by identity.
        self._numbers: dict[Any, int] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            value = HeldTensor(value)
        if not isinstance(value, LazyTensor):
            return NotImplemented
        number = self._numbers.setdefault(value, len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        storage = _Storage(str(number), value.dtype, value.numel)
        strides = _contiguous(value.shape)
        arguments = (storage, 0, value.shape, strides, False, collections.OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments

    def persistent_id(self, value: Any) -> tuple | None:
        if not isinstance(value, _Storage):
            return None
        return "storage", getattr(torch, _STORAGES[value.dtype]), value.key, "cpu", value.numel


def write_torch_file(file: BinaryIO, content: Any) -> None:
    """Write, piece by piece, a file that ``torch.load`` reads, also with ``mmap=True`` and ``weights_only=True``.

    Args:
        file: to write to; it need not be seekable.
        content: plain values and tensors, lazy or in memory, on any device; they are loaded to the CPU.
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
    """Return an extra field for a record's header, such that the bytes after it are aligned."""
    is_large = record.file_size * 1.05 > zipfile.ZIP64_LIMIT  # the same condition as in zipfile
    header = _LOCAL_HEADER.size + len(record.filename) + (_ZIP64_EXTRA if is_large else 0)
    begin = archive.fp.tell() + header + 4  # offset of the field itself
    size = -begin % _ALIGNMENT
    return struct.pack("<HH", _PADDING_ID, size) + bytes(size)


def named_tensors(content: Any, name: str = "") -> Iterator[tuple[str, LazyTensor]]:
    """Yield the lazy tensors in nested dictionaries and sequences, each with the path of keys that leads to it."""
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
    """Return the message for a file that could not be read."""
    if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: an offset outside the file
        return f"cannot read {path}: {error.strerror or error}"
    with open(path, "rb") as file:
        is_old = file.read(len(_OLD_FORMAT)) == _OLD_FORMAT
    if is_old:
        return (
            f"{path} is in torch's format from before 1.6. If you trust it, convert it: torch.save(torch.load("
            f"{str(path)!r}, weights_only=False), 'new.pt')"
        )
    reason = (str(error).splitlines() or [""])[0].split("Re-running")[0].strip()  # torch's advice is dangerous
    return (
        f"{path} ({path.stat().st_size:,} bytes) is truncated or not a checkpoint: it cannot be read "
        f"({type(error).__name__}: {reason})"
    )


def is_verifying() -> bool:
    """Return whether checksums and weights are checked when a checkpoint is read."""
    return os.environ.get(VARIABLE) != "0"


def check_records(path: str | Path) -> None:
    """Compare a file with its checksums, unless the environment says not to.

    A file in torch's old format, which has no checksums, passes.

    Raises:
        UserError: the file has changed since it was written; the message names the tensors.
    """
    if is_verifying() and zipfile.is_zipfile(path) and (problem := record_problem(Path(path))):
        raise UserError(problem)


def record_problem(path: Path) -> str | None:
    """Return the message for records that do not match their checksums, which names their tensors; None if all match.

    Raises:
        UserError: the file is truncated, or no archive.
    """
    places = damaged_places(path)
    if not places:
        return None
    try:
        content = read_structure(path)
    except UserError:  # data.pkl, which maps records to tensors, is damaged itself
        content = None
    names = []
    stored = [(name, tensor) for name, tensor in named_tensors(content) if isinstance(tensor, StoredTensor)]
    for record, start, stop in places:
        names += [name for name, tensor in stored if start <= tensor.offset < stop] or [record]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{path} is damaged: {', '.join(names[:_SHOWN])}{more} differs from its checksum"


def damaged_places(path: str | Path) -> list[tuple[str, int, int]]:
    """Return the records of a file whose bytes do not match the checksum in the archive.

    Returns:
        (name without the folder, offset of its first byte, offset after its last byte) of each.

    Raises:
        UserError: the file is truncated, or no archive.
    """
    path, damaged = Path(path), []
    try:
        with zipfile.ZipFile(path) as archive:
            records = sorted(archive.infolist(), key=lambda info: info.header_offset)
            ends = [info.header_offset for info in records[1:]] + [path.stat().st_size]
            for info, end in zip(records, ends, strict=True):
                if not _is_intact(archive, info):
                    damaged.append((info.filename.partition("/")[2], info.header_offset, end))
    except Exception as error:  # reading arbitrary bytes can raise anything
        raise UserError(unreadable(path, error)) from error
    return damaged


def _is_intact(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    if info.external_attr & _IS_FOLDER or info.volume:  # zipfile ignores these fields, but torch would read nothing
        return False
    try:
        with archive.open(info) as record:
            while record.read(1 << 20):
                pass
    except OSError:
        raise
    except Exception:
        return False
    return True
