"""Plan which candidates are read together: common beginnings once, little padding, full passes.

Groups whose candidates share beginnings of similar length are read together, once for each group, up to the length of
the shortest one. The candidates then continue in blocks of similar length. The cost is counted in positions: padding,
and tokens of longer beginnings that are read once for each candidate. Each further beginning or block costs a fixed
number of positions as well, because token mixing processes them one by one. All other work is done for as many
beginnings, or blocks, at once as fit into a pass.

Letters: ``G`` groups of a batch, ``n`` items in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from smlp.inference.scoring.texts import Candidates


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
    shared = [readings[place].num_shared for place in order]
    again = [len(readings[place].inputs) - 1 for place in order]
    longest = [readings[place].longest for place in order]
    num_again = [0, *accumulate(again)]
    in_all = [0, *accumulate(more * length for more, length in zip(again, shared, strict=True))]

    def read_again(begin: int, end: int) -> int:
        return in_all[end] - in_all[begin] - shared[end - 1] * (num_again[end] - num_again[begin])

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
    longest = [readings[place].longest for place in order]
    num_rows = [0, *accumulate(len(readings[place].inputs) for place in order)]
    in_all = [0, *accumulate(sum(map(len, readings[place].inputs)) for place in order)]

    def padded(begin: int, end: int) -> int:
        return longest[begin] * (num_rows[end] - num_rows[begin])

    def padding(begin: int, end: int) -> int:
        return padded(begin, end) - (in_all[end] - in_all[begin])

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
    """Return the rows and padded size of the blocks that go on from a beginning."""
    rows = [
        (len(inputs) - beginning.num_shared, group, number)
        for group in beginning.groups
        for number, inputs in enumerate(readings[members[group]].inputs)
    ]
    rows.sort(key=lambda row: -row[0])
    lengths = [length for length, _, _ in rows]
    in_all = [0, *accumulate(lengths)]

    def padded(begin: int, end: int) -> int:
        return lengths[begin] * (end - begin)

    def padding(begin: int, end: int) -> int:
        return padded(begin, end) - (in_all[end] - in_all[begin])

    parts = partition(len(rows), padding, padded, batch_tokens, block_tokens)
    return [(tuple(row[1:] for row in rows[begin:end]), padded(begin, end)) for begin, end in parts]


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
    waste: Callable[[int, int], int],
    size: Callable[[int, int], int],
    max_size: int,
    cost_of_part: int,
) -> list[tuple[int, int]]:
    """Cut ``count`` items into runs (begin, end) with the least waste, counting a cost for each run.

    Args:
        count: n.
        waste: of a run; it grows with the run.
        size: of a run; no run of several items is larger than ``max_size``.
        max_size, cost_of_part: in the same unit.
    """
    best, begin_of = [0] + [0] * count, [0] * (count + 1)
    for end in range(1, count + 1):
        best[end] = best[end - 1] + waste(end - 1, end) + cost_of_part
        begin_of[end] = end - 1
        for begin in range(end - 2, -1, -1):
            wasted = waste(begin, end)
            # a batch whose padding costs more than another batch is never worthwhile, nor are longer ones
            if size(begin, end) > max_size or wasted > (end - begin) * cost_of_part:
                break
            total = best[begin] + wasted + cost_of_part
            if total < best[end]:
                best[end], begin_of[end] = total, begin
    parts, end = [], count
    while end:
        parts.append((begin_of[end], end))
        end = begin_of[end]
    return parts[::-1]
