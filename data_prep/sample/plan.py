"""Decide which documents are in the sample, in which split and how often, and write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data_prep.corpus import SPLITS
from data_prep.flow.documents import ReadSettings, Record, counted_records
from data_prep.flow.manifest import Counts, PartResult
from data_prep.flow.parts import FilePart
from data_prep.flow.streams import WrittenFile, write_stream
from data_prep.sample.survey import Measure, Survey, hashes, place_of
from smlp.errors import UserError

_BITS_OF_SUMS = 22  # 32 MB
_END = 1 << 64
Blocks = Callable[[], Iterator[tuple[np.ndarray, ...]]]  # keys, sizes, places, groups: (n,) each


@dataclass(frozen=True)
class Cut:
    """The documents whose (key, place) is below this one; the document at it may be taken in part."""

    key: int  # hash of the first document that does not fit
    place: int  # its place
    taken: int  # size of those below
    left: int  # rest of the budget, for the document at the cut


_NOTHING = Cut(0, 0, 0, 0)


def find_cuts(blocks: Blocks, budgets: Sequence[int]) -> list[Cut]:
    """Return the cut of each group below which its documents, by their keys, add up to its budget at most.

    The documents are read twice. Memory holds a sum for each group and bin of keys, ``2**_BITS_OF_SUMS`` at most, and
    the documents in one bin of each group.
    """
    bits = min(16, _BITS_OF_SUMS - (len(budgets) - 1).bit_length())
    shift = np.uint64(64 - bits)
    sums = np.zeros((len(budgets), 1 << bits), dtype=np.int64)
    for keys, sizes, _, groups in blocks():
        np.add.at(sums, (groups, (keys >> shift).astype(np.int64)), sizes.astype(np.int64))
    cumulative = sums.cumsum(axis=1)
    fatal = (cumulative <= np.array(budgets)[:, None]).sum(axis=1)  # the bin that goes over the budget, if one does
    found: list[list[tuple[int, int, int]]] = [[] for _ in budgets]
    for keys, sizes, places, groups in blocks():
        inside = (keys >> shift).astype(np.int64) == fatal[groups]
        columns = (column[inside].tolist() for column in (groups, keys, places, sizes))
        for group, *document in zip(*columns, strict=True):
            found[group].append(document)
    cuts = []
    for group, budget in enumerate(budgets):
        taken, end = int(cumulative[group, fatal[group] - 1]) if fatal[group] else 0, (_END, 0)
        for key, place, size in sorted(found[group]):
            if taken + size > budget:
                end = (key, place)
                break
            taken += size
        cuts.append(Cut(*end, taken, budget - taken))
    return cuts


@dataclass(frozen=True)
class Quota:
    """The share of one source: all its documents ``passes`` times, and those below ``cut`` once more."""

    available: int
    wanted: int
    passes: int
    cut: Cut


@dataclass(frozen=True)
class Plan:
    """The cuts that decide where each document goes, as plain values that can be sent to the workers."""

    fraction_end: int  # documents whose ``draw`` hash is below are in the fraction
    valid_end: int  # documents of the fraction whose ``split`` hash is below are the validation set
    test_end: int  # those of the others whose ``split`` hash is below are the test set
    quotas: dict[str, Quota]  # by source, of what remains

    def place(self, draw: int, split: int, place: int, source: str) -> tuple[str, int, int]:
        """Return the split of a document ("" for none), how often it is written whole, and how much of it once more."""
        if draw >= self.fraction_end:
            return "", 0, 0
        if split < self.valid_end:
            return "valid", 1, 0
        if split < self.test_end:
            return "test", 1, 0
        quota = self.quotas[source]
        document, cut = (draw, place), (quota.cut.key, quota.cut.place)
        if document < cut:
            return "train", quota.passes + 1, 0
        return "train", quota.passes, quota.cut.left if document == cut else 0


def make_plan(
    survey: Survey,
    fraction: float,
    valid: float,
    test: float,
    budget: int | None,
    weights: dict[str, float] | None,
    repeat: bool,
    unit: str,
) -> Plan:
    """Find the cuts.

    Args:
        survey: of all documents.
        fraction: of the documents, drawn by hash; a smaller fraction is a part of a larger one.
        valid: share of the fraction's documents that is the validation set, exact to a document; equal texts go to
            one split, so that those at the cut may make it smaller.
        test: the same for the test set.
        budget: of the training set, in the unit of the survey; None for all.
        weights: of the sources in the budget; None for their own sizes.
        repeat: read a source several times to fill its share.
        unit: for messages.

    Raises:
        UserError: a share leaves a split empty, sources and weights do not match, or there is too little.
    """
    end = min(round(fraction * _END), _END)
    last = np.uint64(end - 1)

    def in_fraction() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        for rows, places, sources in survey.blocks():
            inside = rows["draw"] <= last
            yield rows[inside], places[inside], sources[inside]

    number = sum(len(rows) for rows, _, _ in in_fraction())
    if number == 0:
        raise UserError(f"--fraction {fraction} leaves no documents")

    def by_split() -> Iterator[tuple[np.ndarray, ...]]:
        for rows, places, _ in in_fraction():
            yield rows["split"], np.ones(len(rows), np.int64), places, np.zeros(len(rows), np.int64)

    num_valid, num_test = (_held_out(number, share, name) for share, name in ((valid, "valid"), (test, "test")))
    if num_valid + num_test >= number:
        raise UserError(f"--valid {valid} and --test {test} leave nothing to train on of {number:,} documents")
    ends, below = [], 0
    for name, share, count in (("valid", valid, num_valid), ("test", test, num_test)):
        split_end = find_cuts(by_split, [below + count])[0].key
        before = sum(int(np.count_nonzero(keys < np.uint64(split_end))) for keys, *_ in by_split())
        if count and before == below:
            equal = sum(int(np.count_nonzero(keys == np.uint64(split_end))) for keys, *_ in by_split())
            raise UserError(
                f"--{name} {share} of {number:,} documents is {count:,}, but {equal:,} at its beginning have the same "
                "text, and equal texts go to one split: run 'smlp data dedup' before, or give a larger share"
            )
        ends.append(split_end)
        below = before

    def for_training() -> Iterator[tuple[np.ndarray, ...]]:
        for rows, places, sources in in_fraction():
            kept = rows["split"] >= np.uint64(ends[1])
            yield rows["draw"][kept], rows["size"][kept], places[kept], sources[kept]

    available = np.zeros(len(survey.sources), dtype=np.int64)
    for _, sizes, _, sources in for_training():
        np.add.at(available, sources, sizes.astype(np.int64))
    amounts = dict(zip(survey.sources, available.tolist(), strict=True))
    wanted = _shares(amounts, budget, weights, repeat, unit)
    whole = int(weights is None)  # without weights, a source without size is written whole
    passes = {source: wanted[source] // amount if amount else whole for source, amount in amounts.items()}
    rests = [wanted[source] - passes[source] * amount for source, amount in amounts.items()]
    cuts = find_cuts(for_training, rests) if any(rests) else [_NOTHING] * len(rests)
    quotas = {
        source: Quota(amount, wanted[source], passes[source], cut if rest else _NOTHING)
        for (source, amount), rest, cut in zip(amounts.items(), rests, cuts, strict=True)
    }
    return Plan(end, *ends, quotas)


def _held_out(number: int, share: float, name: str) -> int:
    count = round(number * share)
    if share and not count:
        raise UserError(
            f"--{name} {share} of {number:,} documents rounds to no document: give a larger share, or 0 for none"
        )
    return count


def _shares(
    available: dict[str, int], budget: int | None, weights: dict[str, float] | None, repeat: bool, unit: str
) -> dict[str, int]:
    """Return how much is wanted of each source, in whole units that add up to the budget."""
    total = sum(available.values())
    if weights is None:
        if budget is None:
            return available
        if budget > total and not repeat:
            raise UserError(
                f"a budget of {budget:,} {unit} is more than the {total:,} available: lower it, or add --repeat"
            )
        return _divide(budget, {source: Fraction(amount) for source, amount in available.items()})
    if set(weights) != set(available):
        missing, unknown = sorted(set(available) - set(weights)), sorted(set(weights) - set(available))
        raise UserError(
            "--weights must name each source once: "
            + "; ".join(
                ([f"{', '.join(missing)} missing"] if missing else [])
                + ([f"there is no {', '.join(unknown)}"] if unknown else [])
            )
        )
    exact = {source: Fraction(str(weights[source])) for source in available}
    if budget is None:  # limited by the scarcest source, which is used up
        for source, weight in exact.items():
            if weight and not available[source]:
                raise UserError(
                    f"--weights wants {unit} of source {source}, of which nothing is left for training: without "
                    "--budget, the scarcest source limits the others; set its weight to 0, or give a larger --fraction"
                )
        scale = min(available[source] / weight for source, weight in exact.items() if weight)
        return {source: int(scale * weight) for source, weight in exact.items()}
    wanted = _divide(budget, exact)
    for source, amount in wanted.items():
        if amount > available[source] and (not repeat or not available[source]):
            raise UserError(
                f"--weights wants {amount:,} {unit} of source {source}, which has {available[source]:,}: lower its "
                "weight or the budget" + ("" if not available[source] else ", or add --repeat to read it again")
            )
    return wanted


def _divide(budget: int, weights: dict[str, Fraction]) -> dict[str, int]:
    """Return whole numbers that add up to ``budget``, each the exact share of a weight rounded down or up."""
    total = sum(weights.values())
    if not total:
        return dict.fromkeys(weights, 0)
    exact = {source: budget * weight / total for source, weight in weights.items()}
    shares = {source: int(share) for source, share in exact.items()}
    left = budget - sum(shares.values())
    for source in sorted(exact, key=lambda source: shares[source] - exact[source])[:left]:  # the largest remainders
        shares[source] += 1
    return shares


def write_part(
    part: FilePart,
    out: Path,
    *,
    reading: ReadSettings,
    measure: Measure,
    seed: int,
    plan: Plan,
    order: dict[str, int],
    suffix: str,
) -> PartResult:
    """Write ``OUT/SPLIT/PART.jsonl`` for the splits that the part has documents of.

    ``order`` gives the position of each part by its name.
    """
    counts, defects, number = Counts(), [], 0
    paths = {split: out / split / f"{part.name}.jsonl{suffix}" for split in SPLITS}
    opened: dict[str, tuple[BinaryIO, WrittenFile]] = {}
    with ExitStack() as files:
        for piece in counted_records(part, reading, counts, defects):
            if reason := measure.reason_against(piece.text):
                counts.drop(reason)
                continue
            draw, split_hash = hashes(piece.text, seed)
            split, times, beginning = plan.place(draw, split_hash, place_of(order[part.name], number), piece.source)
            number += 1
            copies = 0
            for copy, size in _copies(piece, times, beginning, measure):
                if split not in opened:
                    opened[split] = files.enter_context(write_stream(paths[split]))
                opened[split][0].write(copy.line())
                copies += 1
                counts.other[f"{split}: documents"] += 1
                if measure.unit != "documents":
                    counts.other[f"{split}: {measure.unit}"] += size
                    counts.other[f"{split}: {measure.unit} of source {copy.source}"] += size
            if not copies:
                counts.drop("beyond the budget" if split else "not in the fraction")
                continue
            counts.keep()
            if copies > 1:
                counts.other[f"{split}: documents written again"] += copies - 1
    for split in set(SPLITS) - set(opened):
        paths[split].unlink(missing_ok=True)  # left by an earlier run with other files
    return PartResult([written.row(out) for _, (_, written) in sorted(opened.items())], counts, defects)


def _copies(record: Record, times: int, beginning: int, measure: Measure) -> Iterator[tuple[Record, int]]:
    """Yield the document ``times`` times, later copies with ids of their own, and its beginning once more, with sizes.

    A document without size is not repeated.
    """
    size = measure(record.text) if times else 0
    for copy in range(times if size else min(times, 1)):
        yield record if copy == 0 else replace(record, id=f"{record.id}#{copy + 1}"), size
    text = measure.beginning(record.text, beginning) if beginning else ""
    if text:
        yield replace(record, text=text, id=f"{record.id}#{times + 1}" if times else record.id), measure(text)
