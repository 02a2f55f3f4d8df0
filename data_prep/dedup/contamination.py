"""Find documents that overlap with the zero-shot tasks, by runs of words that both contain.

As in Brown et al. (2020), "Language models are few-shot learners", appendix C: runs of 13 words in lower case without
punctuation; a shorter example is searched as a whole if it has at least 8 words. Unlike there, punctuation separates
words ("don't" is two), and the length of runs does not depend on the task.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dedup.signatures import ngram_hashes, word_hashes, words_of
from data_prep.flow.streams import write_bytes
from smlp.errors import UserError
from smlp.evaluation.zeroshot.files import has_one
from smlp.evaluation.zeroshot.readers import (
    READERS,
    CopaItem,
    HellaSwagItem,
    Item,
    PiqaItem,
    StoryClozeItem,
    WinograndeItem,
)

NGRAM = 13
MIN_NGRAM = 8  # shortest text to search, if it is shorter than NGRAM


def texts_of(item: Item) -> list[str]:
    """Return the texts that a corpus with this record would contain: its text with each of its candidates filled in."""
    if isinstance(item, CopaItem):
        return [f"{item.premise} {choice}" for choice in item.choices]
    if isinstance(item, PiqaItem):
        return [f"{item.goal} {solution}" for solution in item.solutions]
    if isinstance(item, StoryClozeItem):
        return [" ".join((*item.sentences, ending)) for ending in item.endings]
    if isinstance(item, WinograndeItem):
        return [item.sentence.replace("_", option) for option in item.options]
    if isinstance(item, HellaSwagItem):
        return [f"{item.ctx_a} {item.ctx_b} {ending}" for ending in item.endings]
    return [item.passage, *(item.query.replace("@placeholder", answer) for answer in item.answers)]


@dataclass(frozen=True)
class TaskNgrams:
    """n-grams of all tasks, in files below ``folder``."""

    folder: Path  # ``ngrams.bin``, sorted; ``records.bin``, a record of each; ``table.bin``, a quick test
    names: tuple[str, ...]  # of tasks and splits, ``copa/val``
    bases: tuple[int, ...]  # number of the first record of each, and of all records
    lengths: tuple[int, ...]  # of n-grams, in words
    digest: str  # of the n-grams, and of what they belong to
    too_short: tuple[int, ...]  # records of each that are not searched: no text has min(``MIN_NGRAM``, n) words


def read_tasks(data_dir: Path, splits: str) -> dict[str, list[list[str]]]:
    """Read the texts of the records of each task and split in a folder, as ``smlp zeroshot --data-dir`` reads it.

    ``splits`` is "scoring" for the splits that are scored by default, or "all".

    Raises:
        UserError: there is none, or one is malformed.
    """
    found = {}
    for reader in READERS.values():
        for split, names in reader.splits.items():
            if splits == "scoring" and split != next(iter(reader.splits)):
                continue
            if has_one(data_dir, reader.folders, names):
                found[f"{reader.name}/{split}"] = [texts_of(item) for item in reader.read(data_dir, split)]
    if not found:
        raise UserError(f"--decontaminate {data_dir} holds none of the files that 'smlp zeroshot --data-dir' reads")
    return found


def index_tasks(texts: dict[str, list[list[str]]], n: int, folder: Path) -> TaskNgrams:
    """Write the n-grams of tasks to files below ``folder``, for all workers to read.

    ``texts`` are those of each record.

    Raises:
        UserError: all texts are too short.
    """
    grams: list[np.ndarray] = []
    records: list[np.ndarray] = []
    lengths, bases, too_short = set(), [0], []
    for task in texts.values():
        short = 0
        for number, alternatives in enumerate(task):
            hashes = [(length, keys) for text in alternatives for length, keys in _grams(text, n)]
            short += not hashes
            if hashes:
                keys = np.unique(np.concatenate([keys for _, keys in hashes]))
                grams.append(keys)
                records.append(np.full(len(keys), bases[-1] + number, dtype=np.int64))
                lengths.update(length for length, _ in hashes)
        bases.append(bases[-1] + len(task))
        too_short.append(short)
    if not grams:
        raise UserError(f"--decontaminate: no text of {', '.join(texts)} has {min(MIN_NGRAM, n)} words")
    all_grams = np.concatenate(grams)
    order = np.argsort(all_grams, kind="stable")
    all_grams, all_records = all_grams[order], np.concatenate(records)[order]
    table = np.zeros(1 << max(int(8 * len(all_grams)).bit_length(), 10), dtype=bool)
    table[all_grams & np.uint64(len(table) - 1)] = True
    owners = json.dumps([list(texts), bases]).encode()
    digest = hashlib.sha256(all_grams.tobytes() + all_records.tobytes() + owners).hexdigest()
    folder /= digest[:16]  # that of other tasks may be in use
    for name, values in (("ngrams", all_grams), ("records", all_records), ("table", table)):
        write_bytes(folder / f"{name}.bin", values.tobytes())
    return TaskNgrams(folder, tuple(texts), tuple(bases), tuple(sorted(lengths)), digest, tuple(too_short))


def _grams(text: str, n: int) -> Iterable[tuple[int, np.ndarray]]:
    hashes = word_hashes(words_of(text))
    length = min(len(hashes), n)
    if length >= min(MIN_NGRAM, n):
        yield length, ngram_hashes(hashes, length)


@cache
def _arrays(folder: Path, digest: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Map the files into memory, so that the workers of a machine share them."""
    kinds = (("ngrams", np.uint64), ("records", np.int64), ("table", bool))
    ngrams, records, table = (np.memmap(folder / f"{name}.bin", dtype=kind, mode="r") for name, kind in kinds)
    return ngrams, records, table


class Index:
    """Compare documents with the tasks and keep count."""

    def __init__(self, tasks: TaskNgrams) -> None:
        self._tasks = tasks
        self._ngrams, self._records, self._table = _arrays(tasks.folder, tasks.digest)
        self._mask = np.uint64(len(self._table) - 1)
        self._bases = np.array(tasks.bases)
        self._documents = dict.fromkeys(tasks.names, 0)
        self._hits = dict.fromkeys(tasks.names, 0)
        self._hit_records: dict[str, set[int]] = {name: set() for name in tasks.names}

    def hits(self, hashes: np.ndarray) -> dict[str, tuple[int, int, int]]:
        """Compare one document, given the hashes of its words.

        Returns:
            For each task that it overlaps with: how many of its n-grams are in the task; the first word of the first
            of them; that one's length.
        """
        found: dict[str, list[tuple[int, int]]] = {}
        for length in self._tasks.lengths:
            keys = ngram_hashes(hashes, length)
            places = np.flatnonzero(self._table[keys & self._mask])
            starts = np.searchsorted(self._ngrams, keys[places], side="left")
            stops = np.searchsorted(self._ngrams, keys[places], side="right")
            for place, start, stop in zip(places, starts, stops, strict=True):
                records = self._records[start:stop]
                owners = np.searchsorted(self._bases, records, side="right") - 1
                for owner in np.unique(owners):
                    name = self._tasks.names[owner]
                    found.setdefault(name, []).append((int(place), length))
                    self._hit_records[name].update((records[owners == owner] - self._bases[owner]).tolist())
        for name, places in found.items():
            self._documents[name] += 1
            self._hits[name] += len(places)
        return {name: (len(places), *min(places)) for name, places in found.items()}

    def facts(self) -> dict[str, Any]:
        """Return the counts of a part, for :func:`summary`."""
        return {
            name: {"documents": self._documents[name], "ngrams": number, "records": sorted(self._hit_records[name])}
            for name, number in self._hits.items()
            if number
        }


def summary(tasks: TaskNgrams, parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each task: documents that overlap, n-grams found in them, records found, of how many."""
    rows = []
    for number, name in enumerate(tasks.names):
        facts = [part[name] for part in parts if name in part]
        records = set().union(*(part["records"] for part in facts))
        rows.append(
            {
                "task": name,
                "documents": sum(part["documents"] for part in facts),
                "ngrams": sum(part["ngrams"] for part in facts),
                "records_found": len(records),
                "records": tasks.bases[number + 1] - tasks.bases[number],
                "records_too_short": tasks.too_short[number],
            }
        )
    return rows
