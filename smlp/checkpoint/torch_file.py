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
import os
import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from smlp.checkpoint.lazy import FileVersion, HeldTensor, LazyTensor, StoredTensor, as_bytes
from smlp.checkpoint.pickled import LOCAL_HEADER, MOST_BITS, STORAGES, Reader, Refused, Storage, contiguous
from smlp.errors import UserError
from smlp.files import regular_file

VARIABLE = "SMLP_VERIFY_CHECKPOINTS"
_SHOWN = 3  # most tensors named in a message
_IS_FOLDER = 0x10  # attribute bit that marks a folder for MS-DOS and torch
_FOLDER = "archive"
_ALIGNMENT = 64  # of tensors in the file, in bytes; a memory-mapped file can then be used in place
_OLD_FORMAT = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")  # how files of torch.save began before 1.6
_RECORD = b"PK\3\4"  # how an archive begins
# of the list of records: its end, that of a large archive, and where the latter begins
_END, _END_SIGNATURE = struct.Struct("<4s6xHIIH"), b"PK\5\6"
_END64, _END64_SIGNATURE = struct.Struct("<4s28xQQQ"), b"PK\6\6"
_LOCATOR, _LOCATOR_SIGNATURE = struct.Struct("<8xQ4x"), b"PK\6\7"
_ZIP64_EXTRA = 20  # bytes that zipfile adds to the header of a large record
_CAUSE = re.compile(r"WeightsUnpickler error: (.*?)(?: was not|\. |$)", re.MULTILINE)  # stands below the advice
_ADVICE = re.compile("Weights only load failed|Re-running|This file can still be loaded")
_PADDING_ID = 0x4246  # extra field with which torch also aligns records
_MOST_VALUES = 10_000_000  # most values in a file; a list that is referenced twice counts twice


class OtherClassError(UserError):
    """Raised for a file that holds objects of other classes than tensors and plain values."""


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
            records = {info.filename.partition("/")[2].lower(): info for info in _stored_records(archive, path)}
            if "byteorder" in records and archive.read(records["byteorder"]).decode() != sys.byteorder:
                raise Refused("numbers in the byte order of another kind of machine")
            reader = Reader(archive.read(records["data.pkl"]), version, records)
            content = reader.load()
        _count_values(content, {})
    except Refused as refused:
        raise UserError(f"{path} holds {refused}, which is not read") from None
    except Exception as error:  # unpickling arbitrary bytes can raise anything
        raise UserError(unreadable(path, error)) from error
    if reader.foreign is not None:
        raise OtherClassError(f"{path} holds {reader.foreign.name}, which is not read")
    return content


def _stored_records(archive: zipfile.ZipFile, path: Path) -> list[zipfile.ZipInfo]:
    """Return the records of an archive, which must be uncompressed and fit into the file."""
    records = archive.infolist()
    _check_directory(records, archive.comment, path)
    if any(info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size for info in records):
        raise Refused("compressed records")
    if sum(info.file_size for info in records) > path.stat().st_size:
        raise Refused("records that are larger than the file")
    # torch, which takes capitals and small letters for the same, would read the other one
    if len({info.orig_filename.partition("/")[2].lower() for info in records}) < len(records):
        raise Refused("two records of one name")
    return records


def _check_directory(records: Sequence[zipfile.ZipInfo], comment: bytes, path: Path) -> None:
    """Refuse an archive of which torch may read other records than Python does.

    Both look for the list of records from the end of the file. Torch takes its offset as it is written; Python takes
    the list that ends where the end is, and adds what lies before the archive to all offsets.
    """
    end = path.stat().st_size - len(comment) - _END.size
    with open(path, "rb") as file:
        file.seek(max(end - _END64.size - _LOCATOR.size, 0))
        tail = file.read()[: -len(comment) or None]
    signature, num_records, length, offset, _ = _END.unpack(tail[-_END.size :])
    if tail[-_END.size - _LOCATOR.size :].startswith(_LOCATOR_SIGNATURE):
        (at,) = _LOCATOR.unpack_from(tail, len(tail) - _END.size - _LOCATOR.size)
        end64, num_records, length, offset = _END64.unpack_from(tail)
        end -= _LOCATOR.size + _END64.size
        if at != end or end64 != _END64_SIGNATURE:
            raise Refused("a list of records at another place")
    if signature != _END_SIGNATURE or offset + length != end:
        raise Refused("a list of records at another place")
    first = min((info.header_offset for info in records), default=0)
    renamed = any(info.filename != info.orig_filename for info in records)
    if num_records != len(records) or first != 0 or renamed:
        raise Refused("a list of other records")


def _count_values(content: Any, counted: dict[int, int]) -> int:
    """Return the number of values in nested dictionaries and sequences; shared ones count each time.

    Each character of a text and each byte of a whole number counts, as they become text in a ``.safetensors`` file.
    """
    if not isinstance(content, (Mapping, list, tuple, set, frozenset, argparse.Namespace)):
        if isinstance(content, int):
            if content.bit_length() > MOST_BITS:
                raise Refused(f"a number of more than {MOST_BITS:,} bits")
            return 1 + content.bit_length() // 8
        return 1 + len(content) if isinstance(content, (str, bytes)) else 1
    if id(content) not in counted:
        counted[id(content)] = _MOST_VALUES  # until the count is known: content that contains itself is refused
        held = vars(content) if isinstance(content, argparse.Namespace) else content
        inner = [*held.keys(), *held.values()] if isinstance(held, Mapping) else [*held]
        inner += vars(content).values() if isinstance(content, collections.OrderedDict) else ()
        total = 1 + sum(_count_values(value, counted) for value in inner)
        if total > _MOST_VALUES:
            raise Refused(f"more than {_MOST_VALUES:,} values")
        counted[id(content)] = total
    return counted[id(content)]


def check_values(content: Any, path: str | Path) -> None:
    """Refuse content from another format that a checkpoint would not be read with.

    Raises:
        UserError: there are too many values, or numbers that are too large.
    """
    try:
        _count_values(content, {})
    except Refused as refused:
        raise UserError(f"{path} holds {refused}, which is not read") from None


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
        storage = Storage(str(number), value.dtype, value.numel)
        strides = contiguous(value.shape)
        arguments = (storage, 0, value.shape, strides, False, collections.OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments

    def persistent_id(self, value: Any) -> tuple | None:
        if not isinstance(value, Storage):
            return None
        return "storage", getattr(torch, STORAGES[value.dtype]), value.key, "cpu", value.numel


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
        # every record has ZipInfo's date: that of the clock may be one that the format does not have
        archive.writestr(zipfile.ZipInfo(f"{_FOLDER}/data.pkl"), buffer.getvalue())
        archive.writestr(zipfile.ZipInfo(f"{_FOLDER}/byteorder"), sys.byteorder)
        for number, tensor in enumerate(pickler.tensors):
            record = zipfile.ZipInfo(f"{_FOLDER}/data/{number}")
            record.file_size = tensor.num_bytes
            record.extra = _padding(archive, record)
            with archive.open(record, "w") as out:
                for piece in tensor.pieces():
                    out.write(as_bytes(piece))
        archive.writestr(zipfile.ZipInfo(f"{_FOLDER}/version"), "3\n")


def _padding(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bytes:
    """Return an extra field for a record's header, such that the bytes after it are aligned."""
    is_large = record.file_size * 1.05 > zipfile.ZIP64_LIMIT  # the same condition as in zipfile
    header = LOCAL_HEADER.size + len(record.filename) + (_ZIP64_EXTRA if is_large else 0)
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
    size, reason = path.stat().st_size, named_error(error)
    return f"{path} ({size:,} bytes) is truncated or not a checkpoint: it cannot be read ({reason})"


def named_error(error: Exception) -> str:
    """Return an error of a reader in one line, without torch's advice to read the file all the same."""
    said = _CAUSE.findall(str(error)) or _ADVICE.split((str(error).splitlines() or [""])[0])
    reason = said[0].strip()
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def is_verifying() -> bool:
    """Return whether checksums and weights are checked when a checkpoint is read."""
    return os.environ.get(VARIABLE) != "0"


def is_archive(path: str | Path) -> bool:
    """Return whether torch or Python takes a file for an archive; in torch's old format, files are none."""
    with open(path, "rb") as file:
        return file.read(len(_RECORD)) == _RECORD or zipfile.is_zipfile(path)


def check_records(path: str | Path) -> None:
    """Compare a file with its checksums, unless the environment says not to.

    A file in torch's old format, which has no checksums, passes.

    Raises:
        UserError: the file has changed since it was written; the message names the tensors.
    """
    if is_verifying() and is_archive(path) and (problem := record_problem(Path(path))):
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
