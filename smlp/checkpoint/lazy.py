"""Tensors that are read piece by piece, so that working with checkpoints takes little memory whatever their size.

A lazy tensor knows its shape and dtype and reads any run of its elements, in the order in which they lie in memory.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from smlp.errors import UserError

#: bytes held in memory at a time for each source tensor
PIECE_BYTES = 1 << 20
#: of tensors in checkpoints
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


class LazyTensor(ABC):
    """A contiguous tensor whose elements are read on demand."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Return the size of the whole tensor in bytes."""
        return self.numel * self.dtype.itemsize

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Return elements ``start`` to ``stop`` of the flattened tensor, (stop - start,)."""

    def runs(self, start: int, stop: int) -> Iterator[tuple[LazyTensor, int, int]]:
        """Yield where elements ``start`` to ``stop`` lie: a tensor, the first element there and their number."""
        yield self, start, stop - start

    def pieces(self) -> Iterator[Tensor]:
        """Yield all elements in order, in pieces (n,) of at most ``PIECE_BYTES``."""
        step = PIECE_BYTES // self.dtype.itemsize
        for start in range(0, self.numel, step):
            yield self.read(start, min(start + step, self.numel))

    def load(self) -> Tensor:
        """Return the whole tensor, in memory."""
        return self.read(0, self.numel).view(self.shape)

    def mapped(self) -> Tensor:
        """Return the whole tensor; where that is possible, the file is read as its elements are used.

        Its pages are shared with other processes that map the file, until they are written to. The file must not be
        written to in place; replacing it is harmless.
        """
        return self.load()


class HeldTensor(LazyTensor):
    """A tensor in memory, on any device."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self._flat = tensor.detach().reshape(-1)

    def read(self, start: int, stop: int) -> Tensor:
        return self._flat[start:stop].contiguous().cpu()


@dataclass(frozen=True)
class FileVersion:
    """Identity of an opened file: reading fails if the content has been replaced since."""

    path: Path
    stamp: tuple[int, int, int]

    @classmethod
    def of(cls, path: str | Path) -> FileVersion:
        """Return the present version of a file."""
        return cls(Path(path), _stamp(os.stat(path)))

    def read_into(self, target: Tensor, offset: int) -> None:
        """Fill a tensor with the bytes of the file from ``offset`` on.

        Raises:
            UserError: the file has changed, or cannot be read.
        """
        try:
            with open(self.path, "rb", buffering=0) as file:
                unchanged = _stamp(os.fstat(file.fileno())) == self.stamp
                file.seek(offset)
                rest = memoryview(as_bytes(target))
                while unchanged and rest:
                    count = file.readinto(rest)
                    if not count:
                        break
                    rest = rest[count:]
                problem = None if unchanged and not rest else "it has changed since it was opened"
        except OSError as error:
            problem = error.strerror
        if problem is not None:
            raise UserError(f"cannot read {self.path}: {problem}")


def _stamp(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


@dataclass(frozen=True)
class StoredTensor(LazyTensor):
    """A contiguous tensor in a file."""

    version: FileVersion
    #: offset of the first byte in the file
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, start: int, stop: int) -> Tensor:
        elements = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        self.version.read_into(elements, self.offset + start * self.dtype.itemsize)
        return elements

    def mapped(self) -> Tensor:
        if not self.numel or self.offset % self.dtype.itemsize:
            return self.load()
        path = self.version.path
        try:
            bytes_N = np.memmap(path, np.uint8, mode="c", offset=self.offset, shape=(self.num_bytes,))
            is_same = FileVersion.of(path) == self.version
        except (OSError, ValueError) as error:  # numpy's error for a file that has become shorter
            raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
        if not is_same:
            raise UserError(f"cannot read {path}: it has changed since it was opened")
        return torch.from_numpy(bytes_N).view(self.dtype).view(self.shape)


class SplicedTensor(LazyTensor):
    """Runs of elements of other tensors, joined end to end.

    Args:
        shape: of the result.
        runs: (source, first element, number of elements) of each run; all sources have one dtype.
    """

    def __init__(self, shape: Sequence[int], runs: Iterable[tuple[LazyTensor, int, int]]) -> None:
        self.shape = tuple(shape)
        self._runs: list[tuple[LazyTensor, int, int]] = []
        for source, first, length in runs:
            if self._runs and self._runs[-1][0] is source and sum(self._runs[-1][1:]) == first:
                first, length = self._runs[-1][1], self._runs.pop()[2] + length
            self._runs.append((source, first, length))
        self._ends = list(itertools.accumulate(length for _, _, length in self._runs))
        self.dtype = self._runs[0][0].dtype
        assert all(source.dtype == self.dtype for source, _, _ in self._runs) and self._ends[-1] == self.numel

    def runs(self, start: int, stop: int) -> Iterator[tuple[LazyTensor, int, int]]:
        for number in range(bisect.bisect_right(self._ends, start), len(self._runs)):
            source, first, length = self._runs[number]
            begin = self._ends[number] - length
            if begin >= stop:
                break
            low, high = max(start, begin), min(stop, begin + length)
            yield source, first + low - begin, high - low

    def read(self, start: int, stop: int) -> Tensor:
        elements, done = torch.empty(stop - start, dtype=self.dtype, device="cpu"), 0
        for source, first, length in self.runs(start, stop):
            elements[done : done + length] = source.read(first, first + length)
            done += length
        return elements

    def mapped(self) -> Tensor:
        source, first, _ = self._runs[0]
        if len(self._runs) > 1 or not isinstance(source, StoredTensor):
            return self.load()
        return replace(source, offset=source.offset + first * source.dtype.itemsize, shape=self.shape).mapped()


class ComputedTensor(LazyTensor):
    """An elementwise function of tensors of one shape.

    Args:
        sources: at least one tensor; the result has the shape and dtype of the first.
        function: takes an iterator over the same elements (n,) of each source and returns (n,).
    """

    def __init__(self, sources: Sequence[LazyTensor], function: Callable[[Iterator[Tensor]], Tensor]) -> None:
        self.shape, self.dtype = sources[0].shape, sources[0].dtype
        self._sources, self._function = sources, function

    def read(self, start: int, stop: int) -> Tensor:
        return self._function(source.read(start, stop) for source in self._sources).to(self.dtype)


class MadeTensor(LazyTensor):
    """A tensor that is made when it is read.

    Args:
        shape, dtype: of the tensor.
        make: returns it; called for each piece, so it should cache an expensive result.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], Tensor]) -> None:
        self.shape, self.dtype, self._make = tuple(shape), dtype, make

    def read(self, start: int, stop: int) -> Tensor:
        return self._make().reshape(-1)[start:stop].to(self.dtype)


def rows_of(source: LazyTensor, rows: Sequence[int]) -> SplicedTensor:
    """Return rows (e, ...) of a tensor (E, ...)."""
    return joined_rows([(source, row) for row in rows])


def row_range(source: LazyTensor, rows: range) -> LazyTensor:
    """Return consecutive rows of a tensor, which can stay in the file if they lie there one after the other."""
    shape = (len(rows), *source.shape[1:])
    length = math.prod(shape[1:])
    return SplicedTensor(shape, source.runs(rows.start * length, rows.stop * length))


def joined_rows(places: Sequence[tuple[LazyTensor, int]]) -> SplicedTensor:
    """Return rows of several tensors as one tensor; each item is a tensor and the number of a row in it."""
    shape = places[0][0].shape[1:]
    length = math.prod(shape)
    return SplicedTensor((len(places), *shape), ((source, row * length, length) for source, row in places))


def repeated(source: LazyTensor, count: int) -> SplicedTensor:
    """Repeat a tensor (...) as ``count`` equal rows, (count, ...)."""
    return SplicedTensor((count, *source.shape), ((source, 0, source.numel) for _ in range(count)))


def scaled(source: LazyTensor, factor: float) -> LazyTensor:
    """Multiply a tensor by a number."""
    return source if factor == 1 else ComputedTensor([source], lambda elements: next(elements) * factor)


def mean(sources: Sequence[LazyTensor]) -> ComputedTensor:
    """Return the mean of floating-point tensors, summed in float64."""

    def of_elements(elements: Iterator[Tensor]) -> Tensor:
        total = next(elements).to(torch.float64, copy=True)
        for other in elements:
            total += other
        return total / len(sources)

    return ComputedTensor(sources, of_elements)


def is_finite(tensor: LazyTensor, is_mask: bool = False) -> bool:
    """Return whether a tensor has neither NaN nor infinity; a mask may have minus infinity."""
    pieces = (piece.clamp(min=torch.finfo(piece.dtype).min) if is_mask else piece for piece in tensor.pieces())
    return all(torch.isfinite(piece).all() for piece in pieces)


def are_equal(first: LazyTensor, second: LazyTensor) -> bool:
    """Return whether two tensors have the same shape, dtype and content."""
    same_kind = (first.shape, first.dtype) == (second.shape, second.dtype)
    return same_kind and all(torch.equal(a, b) for a, b in zip(first.pieces(), second.pieces(), strict=True))
