"""Read the pickled objects of a ``torch.save`` file: plain values and references to tensors, and nothing else.

Pickle is a program: it can call anything with anything. The reader here follows only what ``torch.save`` writes, and
bounds time and memory by the size of the file.
"""

from __future__ import annotations

import argparse
import collections
import io
import math
import pickle
import struct
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from smlp.checkpoint.lazy import DTYPES, PIECE_BYTES, FileVersion, HeldTensor, StoredTensor

LOCAL_HEADER = struct.Struct("<26xHH")  # header of a zip record; it ends in the lengths of name and extra field
MOST_BITS = 1024  # of a whole number
_MOST_DIMS = 64  # of a tensor, as in torch
_ROOM = 8  # bytes that may be made from one byte of the file by calling classes, or by views of its records
_LARGE = 1 << 31  # whole numbers as keys of dictionaries, see :meth:`Reader._key`
_MOST_ODD_KEYS = 5000  # that are neither text nor smaller numbers
_WITHOUT_MEMORY = ("torch._utils._rebuild_", "torch.serialization._get_layout")  # of other kinds of tensors
_CODED = ("latin1", "latin-1")  # how bytes become text in older formats of pickle
STORAGES = {
    dtype: f"{kind}Storage"
    for dtype, kind in zip(
        DTYPES, ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"), strict=True
    )
}
_DTYPES = {name: dtype for dtype, name in STORAGES.items()}
_PLAIN = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "Counter"): collections.Counter,
    ("argparse", "Namespace"): argparse.Namespace,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
}
_EMPTY = collections.OrderedDict, collections.defaultdict, argparse.Namespace  # their content follows


class Refused(Exception):
    """Raised for content that ``torch.save`` does not write."""


@dataclass(frozen=True)
class Foreign:
    """Stands for an object of another class, of which nothing is made."""

    name: str


@dataclass(frozen=True)
class Storage:
    """A record with the elements of tensors, as the pickled content refers to it."""

    key: str
    dtype: torch.dtype
    numel: int


class Reader(pickle._Unpickler):  # the C version allocates a memo as large as the file demands
    """An unpickler that makes plain values and lazy tensors, and nothing else.

    Pickle can call anything with anything, and set attributes of what exists already. Here, classes are called only as
    ``torch.save`` calls them, with arguments no larger than the file, and only a namespace is given attributes. What
    other classes would make is left out, so that the rest of the file is looked at too.
    """

    def __init__(self, data: bytes, version: FileVersion, records: Mapping[str, zipfile.ZipInfo]) -> None:
        """Read ``data``, which refers to records of the file, given by their names in small letters."""
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._version, self._records = version, records
        self._room = _ROOM * len(data)
        self._room_of_views = self._largest = _ROOM * version.stamp[1] + 16 * PIECE_BYTES
        self._flat: dict[StoredTensor, Tensor | None] = {}
        self._held: dict[Any, HeldTensor] = {}
        self._seen: set[Any] = set()
        self._storages: dict[str, Storage] = {}
        self._odd_keys = _MOST_ODD_KEYS
        #: the first object of another class
        self.foreign: Foreign | None = None

    def persistent_load(self, reference: tuple) -> Any:
        kind, dtype, key, _location, numel = reference
        if isinstance(dtype, Foreign):
            return dtype
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(key) is not str or type(numel) is not int:
            raise Refused("a tensor without a record")
        storage = Storage(key, dtype, numel)
        if self._storages.setdefault(key, storage) != storage:  # torch reads all as the first
            raise Refused("a record of two types or sizes")
        return storage

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
            raise Refused(f"{module}.{name}")
        found = Foreign(f"{module}.{name}")
        self.foreign = self.foreign or found
        return found

    def _call(self, made: Any, arguments: tuple) -> Any:
        """Return what a class or function makes of arguments, which together may not be larger than the file."""
        other = next((value for value in arguments if isinstance(value, Foreign)), None)
        is_torchs = isinstance(made, Foreign) and made.name.startswith("torch.")
        if len(arguments) > 2 and (is_torchs or (other and made == self._tensor)):
            shape = arguments[2]  # of a tensor of another kind
            if type(shape) is tuple and all(type(size) is int for size in shape) and _product(shape) > self._largest:
                raise Refused(f"a tensor of shape {shape} in a file of {self._version.stamp[1]:,} bytes")
        if isinstance(made, Foreign):
            if is_torchs and not made.name.startswith(_WITHOUT_MEMORY):
                raise Refused(made.name)  # torch would make a tensor of any size
            return made
        if other:
            return other
        self._spend(sum(len(value) for value in arguments if isinstance(value, Collection)))
        if made is set:
            return set(map(self._key, *arguments))
        has_pairs = len(arguments) > (made is collections.defaultdict)  # whose keys nobody would look at
        if has_pairs and (made in _EMPTY or (made is collections.Counter and type(arguments[0]) is not dict)):
            raise Refused(f"a {made.__name__} of something")
        return made(*arguments)

    def _reduce_with_names(self) -> None:
        self.stack.pop()  # arguments by name, which only other classes have
        if not isinstance(self.stack[-2], Foreign):
            raise Refused("a call with names")
        self._reduce()

    def _spend(self, count: int) -> None:
        """Count values that are read once more, which takes time that no byte of the file stands for."""
        self._room -= count
        if self._room < 0:
            raise Refused("values that are referred to too often")

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], arguments)

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, Foreign):
            return
        self._spend(len(state) if isinstance(state, dict) else 1)
        if type(made) is argparse.Namespace and type(state) is dict and all(type(name) is str for name in state):
            vars(made).update(state)
        elif type(made) is collections.OrderedDict and type(state) is dict and state.keys() <= {"_metadata"}:
            vars(made).update(state)  # versions of the modules of a state dict
        else:
            raise Refused("an object with attributes")

    def _set_items(self, items: Sequence[Any]) -> None:
        if isinstance(self.stack[-1], Foreign):
            return
        if not isinstance(self.stack[-1], dict):
            raise Refused("items of something else than a dictionary")
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
        if isinstance(self.stack[-1], Foreign):
            return
        if type(self.stack[-1]) is not list:
            raise Refused("values appended to something else than a list")
        self.stack[-1].extend(values)

    def _add_to_set(self) -> None:
        values = self.pop_mark()
        if isinstance(self.stack[-1], Foreign):
            return
        if type(self.stack[-1]) is not set:
            raise Refused("values added to something else than a set")
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
        if any(isinstance(part, int) and part.bit_length() > MOST_BITS for part in parts):
            raise Refused(f"a number of more than {MOST_BITS:,} bits")
        if not all(isinstance(part, (str, bytes, int, float, Foreign, type(None))) for part in parts):
            raise Refused(f"a {type(value).__name__} as a key")
        self._odd_keys -= not isinstance(value, Foreign)
        if self._odd_keys < 0:
            raise Refused(f"more than {_MOST_ODD_KEYS:,} keys that are large numbers or no text")
        return value

    def _make_frozenset(self) -> None:
        values = self.pop_mark()
        self.append(frozenset(map(self._key, values)))

    def _refuse(self) -> None:
        raise Refused("an instruction that torch.save does not write")

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

    def _tensor(self, storage: Storage, start: int, shape: Sequence[int], stride: Sequence[int], *more: Any) -> Any:
        if len(more) > 2 and more[2]:  # torch's metadata: the bytes hold the negative, or conjugate, of the values
            raise Refused("a tensor that is stored as the negative or conjugate of its values")
        if not isinstance(storage, Storage) or len(shape) != len(stride) or len(shape) > _MOST_DIMS:
            raise Refused("a tensor without a shape")
        shape, stride = tuple(shape), tuple(stride)
        numbers, itemsize = (start, *shape, *stride), storage.dtype.itemsize
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
            raise Refused("a tensor without a shape")
        numel = math.prod(shape)
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if numel else 0
        record = self._records[f"data/{storage.key}".lower()]
        held = record.file_size
        # an expanded tensor has more elements than its record; torch.save writes it, but only small ones are accepted
        if (start + span) * itemsize > held or numel * itemsize > max(held, PIECE_BYTES):
            raise Refused(f"a tensor of shape {shape} in a record of {held:,} bytes")
        offset = self._begin_of(record) + start * itemsize
        view = storage, start, shape, stride
        if view not in self._seen:
            self._seen.add(view)
            self._spend_bytes(max(numel, span) * itemsize)
        if numel == 0 or stride == contiguous(shape) or all(size == 1 for size in shape):
            return StoredTensor(self._version, offset, storage.dtype, shape)
        if view not in self._held:  # a record is loaded at most twice in a type, however many views the file has
            source = StoredTensor(self._version, self._begin_of(record), storage.dtype, (held // itemsize,))
            if source not in self._flat:  # of the first view only what it spans: there are mostly no others
                flat = StoredTensor(self._version, offset, storage.dtype, (span,)).load()
                self._flat[source], self._held[view] = None, HeldTensor(flat.as_strided(shape, stride))
                return self._held[view]
            if self._flat[source] is None:
                self._spend_bytes(held)
                self._flat[source] = source.load()
            flat = self._flat[source]
            self._held[view] = HeldTensor(flat.as_strided(shape, stride, start))
        return self._held[view]

    def _spend_bytes(self, num_bytes: int) -> None:
        """Count bytes of tensors, which may lie in the same records."""
        self._room_of_views -= num_bytes
        if self._room_of_views < 0:
            raise Refused("too many tensors in the same records")

    def _begin_of(self, record: zipfile.ZipInfo) -> int:
        """Return the offset in the file at which the bytes of a record begin."""
        with open(self._version.path, "rb") as file:
            file.seek(record.header_offset)
            header = file.read(LOCAL_HEADER.size)
        return record.header_offset + len(header) + sum(LOCAL_HEADER.unpack(header))


def _product(sizes: tuple[int, ...]) -> int:
    """Return the product of sizes, up to 64 of which may be large."""
    return math.prod(sizes[:_MOST_DIMS]) if all(0 <= size < 1 << 63 for size in sizes[:_MOST_DIMS]) else 0


def _bytes_of(text: str, coding: str) -> bytes:
    """Return bytes that were written as text."""
    if type(text) is not str or coding not in _CODED:
        raise Refused("text in an encoding")
    return text.encode("latin-1")


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()
