"""Which candidates are read together: common beginnings once, little padding, no more passes than they are worth.

A batch holds groups whose candidates begin with many tokens alike, as many as the shortest beginning has in all of
them; these are read once for each group. Then the candidates go on, those of like length together. What a batch costs
is its positions: padding, and tokens of longer beginnings that are read once for each candidate. One more pass costs
too, and is put down as so many positions.

Letters: ``G`` groups of a batch, ``n`` items in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from smlp.scoring.texts import Candidates


@dataclass(frozen=True)
class Reading:
    """How a group goes through a model: the inputs of every candidate, of which the first ``num_shared`` are alike."""

    #: ids, start symbols first and the last token left out
    inputs: tuple[tuple[int, ...], ...]
    num_shared: int

    @classmethod
    def of(cls, group: Candidates, share: bool = True) -> Reading:
        """The first scored token is predicted from the last start symbol or the token before it, which is not shared,
        so that everything that is scored comes out of the second pass.

        Args:
            group: of candidates.
            share: whether anything is to be shared.
        """
        inputs = tuple(group.lead + text.tokens[:-1] for text in group.texts)
        return cls(inputs, group.num_filled + group.first if share else 0)

    @property
    def longest(self) -> int:
        """Inputs of the longest candidate."""
        return max(map(len, self.inputs))


@dataclass(frozen=True)
class Batch:
    """Groups that are read together."""

    #: places of the groups in the list of all
    members: tuple[int, ...]
    #: inputs that are read once for each group
    num_shared: int
    #: candidates of each further pass: (place in ``members``, place in the group)
    passes: tuple[tuple[tuple[int, int], ...], ...]


def plan_batches(readings: Sequence[Reading], batch_tokens: int, call_tokens: int) -> list[Batch]:
    """Batches of all groups, those with the longest beginnings first, so that memory runs out at once if it does.

    Args:
        readings: of the groups.
        batch_tokens: positions that one pass may take up, padding included; what takes more is on its own.
        call_tokens: positions that one pass more is worth.
    """
    order = sorted(range(len(readings)), key=lambda place: (-readings[place].num_shared, -readings[place].longest))
    shared = [readings[place].num_shared for place in order]
    again = [len(readings[place].inputs) - 1 for place in order]
    num_again = [0, *accumulate(again)]
    in_all = [0, *accumulate(more * length for more, length in zip(again, shared, strict=True))]

    def read_again(begin: int, end: int) -> int:
        return in_all[end] - in_all[begin] - shared[end - 1] * (num_again[end] - num_again[begin])

    def size(begin: int, end: int) -> int:
        return shared[end - 1] * (end - begin)

    parts = partition(len(order), read_again, size, batch_tokens, call_tokens)
    return [_batch(order[begin:end], readings, batch_tokens, call_tokens) for begin, end in parts]


def _batch(members: Sequence[int], readings: Sequence[Reading], batch_tokens: int, call_tokens: int) -> Batch:
    num_shared = min(readings[place].num_shared for place in members)
    rows = [
        (len(inputs) - num_shared, member, number)
        for member, place in enumerate(members)
        for number, inputs in enumerate(readings[place].inputs)
    ]
    rows.sort(key=lambda row: -row[0])
    lengths = [length for length, _, _ in rows]

    in_all = [0, *accumulate(lengths)]

    def padded(begin: int, end: int) -> int:
        return lengths[begin] * (end - begin)

    def padding(begin: int, end: int) -> int:
        return padded(begin, end) - (in_all[end] - in_all[begin])

    parts = partition(len(rows), padding, padded, batch_tokens, call_tokens)
    passes = tuple(tuple((member, number) for _, member, number in rows[begin:end]) for begin, end in parts)
    return Batch(tuple(members), num_shared, passes)


def partition(
    count: int,
    waste: Callable[[int, int], int],
    size: Callable[[int, int], int],
    max_size: int,
    cost_of_part: int,
) -> list[tuple[int, int]]:
    """Cuts ``count`` items into runs (begin, end) with the least waste, counting a cost for each run.

    Args:
        count: n.
        waste: of a run, which grows with it.
        size: of a run; no run of several items is larger than ``max_size``.
        max_size, cost_of_part: in the same unit.
    """
    best, begin_of = [0] + [0] * count, [0] * (count + 1)
    for end in range(1, count + 1):
        best[end] = best[end - 1] + waste(end - 1, end) + cost_of_part
        begin_of[end] = end - 1
        for begin in range(end - 2, -1, -1):
            wasted = waste(begin, end)
            # a run that wastes more than another run would cost is never worth it, nor are longer ones
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
