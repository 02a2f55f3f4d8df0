"""Plan which candidates are read together: common beginnings once, little padding, full passes.

Groups whose candidates share beginnings of similar length are read together, once for each group, up to the length of
the shortest one. The candidates then continue in blocks of similar length. The cost is counted in positions: padding,
and tokens of longer beginnings that are read once for each candidate. Each further beginning or block costs a fixed
number of positions as well, because token mixing processes them one by one. All other work is done for as many
beginnings, or blocks, at once as fit into a pass.

Letters: ``G`` groups of a batch, ``n`` items in a list.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smlp.inference.scoring.texts import Candidates

#: pinned where scores are kept batch by batch: raise it when lists are cut into other batches
PLANNER = 2
#: positions whose states the rows of a pass may hold, for each one that it may read
_HELD = 4


@dataclass(frozen=True)
class Reading:
    """The inputs of every candidate of a group; the first ``num_shared`` are the same for all."""

    #: ids, start symbols first and the last token left out
    inputs: tuple[tuple[int, ...], ...]
    num_shared: int

    @classmethod
    def of(cls, group: Candidates, share: bool = True) -> Reading:
        """Return the inputs of a group.

        The input that predicts the first scored token (the last start symbol, or the token before it) is not shared,
        so that everything that is scored comes out of the second pass.

        Args:
            group: of candidates.
            share: whether common beginnings are read only once.
        """
        inputs = tuple(group.lead + text.tokens[:-1] for text in group.texts)
        return cls(inputs, group.num_filled + group.first if share else 0)

    @property
    def longest(self) -> int:
        """Inputs of the longest candidate."""
        return max(map(len, self.inputs))


@dataclass(frozen=True)
class Beginning:
    """Groups of candidates whose first inputs are read together."""

    #: places of the groups in ``CandidateBatch.members``
    groups: tuple[int, ...]
    #: inputs that are read once for each group
    num_shared: int


@dataclass(frozen=True)
class CandidateBlock:
    """Candidates of similar length that continue one beginning, padded to the longest of them."""

    #: place in ``CandidateBatch.beginnings``
    beginning: int
    #: (place in ``CandidateBatch.members``, place in the group)
    rows: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class CandidateBatch:
    """Groups of candidates that are scored together: one pass reads all beginnings, further ones the rest."""

    #: places of the groups in the list of all
    members: tuple[int, ...]
    beginnings: tuple[Beginning, ...]
    passes: tuple[tuple[CandidateBlock, ...], ...]


def plan_batches(readings: Sequence[Reading], batch_tokens: int, block_tokens: int) -> list[CandidateBatch]:
    """Return the batches of all groups, those with the longest beginnings first, so that memory runs out at once if at
    all.

    Args:
        readings: of the groups.
        batch_tokens: positions that one pass may take up, padding included; what takes more gets its own pass.
        block_tokens: cost of a further beginning or block, in positions.
    """
    order = sorted(range(len(readings)), key=lambda place: (-readings[place].num_shared, -readings[place].longest))
    shared = np.array([readings[place].num_shared for place in order])
    again = np.array([len(readings[place].inputs) - 1 for place in order])
    longest = [readings[place].longest for place in order]
    num_again, in_all = _sums(again), _sums(again * shared)

    def read_again(begins: np.ndarray, end: int) -> np.ndarray:
        return in_all[end] - in_all[begins] - shared[end - 1] * (num_again[end] - num_again[begins])

    def size(begin: int, end: int) -> int:
        # if nothing is read ahead, one pass holds what else would be a batch without end
        if not shared[end - 1]:
            if shared[begin]:
                return batch_tokens + 1  # never together with what is read ahead
            return longest[begin] * (num_again[end] - num_again[begin] + end - begin)
        return shared[end - 1] * (end - begin)

    parts = partition(len(order), read_again, size, batch_tokens, block_tokens)
    together = [parts[begin:end] for begin, end in _fill([size(*part) for part in parts], batch_tokens)]
    return [_batch(order, some, readings, batch_tokens, block_tokens) for some in together]


def plan_single_passes(readings: Sequence[Reading], batch_tokens: int, block_tokens: int) -> list[CandidateBatch]:
    """Return batches of one pass each, in which nothing is read ahead; arguments as in :func:`plan_batches`."""
    order = sorted(range(len(readings)), key=lambda place: -readings[place].longest)
    longest = np.array([readings[place].longest for place in order])
    num_rows = _sums(len(readings[place].inputs) for place in order)
    in_all = _sums(sum(map(len, readings[place].inputs)) for place in order)

    def padded(begin: Any, end: int) -> Any:
        return longest[begin] * (num_rows[end] - num_rows[begin])

    def padding(begins: np.ndarray, end: int) -> np.ndarray:
        return padded(begins, end) - (in_all[end] - in_all[begins])

    batches = []
    for begin, end in partition(len(order), padding, padded, batch_tokens, block_tokens):
        members = tuple(order[begin:end])
        rows = tuple((at, number) for at, place in enumerate(members) for number in range(len(readings[place].inputs)))
        together = Beginning(tuple(range(len(members))), 0)
        batches.append(CandidateBatch(members, (together,), ((CandidateBlock(0, rows),),)))
    return batches


def _batch(
    order: Sequence[int],
    parts: Sequence[tuple[int, int]],
    readings: Sequence[Reading],
    batch_tokens: int,
    block_tokens: int,
) -> CandidateBatch:
    """Return the batch of the groups ``order[begin:end]`` for all parts, which follow one another."""
    first = parts[0][0]
    members = tuple(order[first : parts[-1][1]])
    beginnings, blocks, sizes = [], [], []
    for begin, end in parts:
        groups = tuple(range(begin - first, end - first))
        num_shared = min(readings[members[group]].num_shared for group in groups)
        beginnings.append(Beginning(groups, num_shared))
        for rows, size in _blocks(members, beginnings[-1], readings, batch_tokens, block_tokens):
            blocks.append(CandidateBlock(len(beginnings) - 1, rows))
            sizes.append(size)
    passes = tuple(tuple(blocks[begin:end]) for begin, end in _fill(sizes, batch_tokens))
    return CandidateBatch(members, tuple(beginnings), passes)


def _blocks(
    members: Sequence[int], beginning: Beginning, readings: Sequence[Reading], batch_tokens: int, block_tokens: int
) -> list[tuple[tuple[tuple[int, int], ...], int]]:
    """Return the rows and size of the blocks that go on from a beginning, whose state each row holds a copy of."""
    rows = [
        (len(inputs) - beginning.num_shared, group, number)
        for group in beginning.groups
        for number, inputs in enumerate(readings[members[group]].inputs)
    ]
    rows.sort(key=lambda row: -row[0])
    lengths = np.array([length for length, _, _ in rows])
    in_all = _sums(lengths)

    def padded(begin: Any, end: int) -> Any:
        return lengths[begin] * (end - begin)

    def padding(begins: np.ndarray, end: int) -> np.ndarray:
        return padded(begins, end) - (in_all[end] - in_all[begins])

    def size(begin: int, end: int) -> int:
        held = beginning.num_shared * (end - begin) + padded(begin, end)
        return max(padded(begin, end), held // _HELD)

    parts = partition(len(rows), padding, size, batch_tokens, block_tokens)
    return [(tuple(row[1:] for row in rows[begin:end]), size(begin, end)) for begin, end in parts]


def _sums(numbers: Iterable[int]) -> np.ndarray:
    """Return the sums of the first 0, 1, ... of all numbers, (n + 1,)."""
    return np.cumsum([0, *numbers])


def _fill(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return runs (begin, end) of items whose sizes sum to at most ``most``; a single item may be larger."""
    runs: list[tuple[int, int]] = []
    begin, total = 0, 0
    for end, size in enumerate(sizes):
        if end > begin and total + size > most:
            runs.append((begin, end))
            begin, total = end, 0
        total += size
    if sizes:
        runs.append((begin, len(sizes)))
    return runs


def partition(
    count: int,
    waste: Callable[[np.ndarray, int], np.ndarray],
    size: Callable[[int, int], int],
    max_size: int,
    cost_of_part: int,
) -> list[tuple[int, int]]:
    """Cut ``count`` items into runs (begin, end) with the least waste, counting a cost for each run.

    Args:
        count: n.
        waste: of runs with these beginnings and one end.
        size: of a run; it grows with earlier beginnings. No run of several items is larger than ``max_size``.
        max_size, cost_of_part: in the same unit.
    """
    every_n, best, begin_of = np.arange(count), np.zeros(count + 1, dtype=np.int64), [0] * (count + 1)
    for end in range(1, count + 1):
        # all at once: of thousands of short items, as many fit into a run
        first = bisect_left(range(end - 1), True, key=lambda begin, end=end: size(begin, end) <= max_size)
        totals = best[first:end] + waste(every_n[first:end], end)
        place = int(totals.argmin())
        best[end], begin_of[end] = totals[place] + cost_of_part, first + place
    parts, end = [], count
    while end:
        parts.append((begin_of[end], end))
        end = begin_of[end]
    return parts[::-1]
