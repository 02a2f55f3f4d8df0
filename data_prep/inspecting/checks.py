"""Compute statistics of binary data, and compare a folder of them with its manifest.

A document is the lines up to an empty one. Letters: ``L`` lines, ``D`` documents, ``V`` symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.flow.manifest import MANIFEST, output_paths, read_manifest
from data_prep.flow.parts import unfinished
from data_prep.flow.streams import sha256_of
from data_prep.inspecting.token_file import TokenFile
from smlp.errors import UserError
from smlp.text.tokenizer import Vocabulary
from smlp.text.tokenizer_files import DICTIONARY

NUM_BINS = 40  # powers of two


@dataclass
class Statistics:
    """Counts of one file, or of several together."""

    vocab_size: int
    tokens: int = 0
    lines: int = 0
    ends: int = 0
    documents: int = 0
    shortest: int = 0
    longest: int = 0
    frequency_V: np.ndarray = field(init=False)
    #: documents of 2^i to 2^(i+1) - 1 tokens, with the </s> of each line but not the empty line at the end
    histogram: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.frequency_V = np.zeros(self.vocab_size, np.int64)
        self.histogram = np.zeros(NUM_BINS, np.int64)

    @classmethod
    def of(cls, file: TokenFile, vocab_size: int) -> Statistics:
        """Read a file that is whole."""
        found = cls(vocab_size, len(file.tokens), len(file.lengths))
        for block in file.token_blocks():
            found.frequency_V += np.bincount(block, minlength=vocab_size)
        open_tokens = 0  # tokens so far of the document in which a block ends
        for _, _, lengths_L in file.line_blocks():
            is_end_L = lengths_L == 1
            found.ends += int(np.count_nonzero(is_end_L))
            tokens_L = np.concatenate([[0], np.cumsum(np.where(is_end_L, 0, lengths_L))])
            at_ends_D = tokens_L[np.flatnonzero(is_end_L) + 1]
            found._add(np.diff(at_ends_D, prepend=-open_tokens) if at_ends_D.size else at_ends_D)
            open_tokens = int(tokens_L[-1]) - (int(at_ends_D[-1]) if at_ends_D.size else -open_tokens)
        found._add(np.array([open_tokens]))
        return found

    def _add(self, tokens_D: np.ndarray) -> None:
        """Count documents by their tokens; several empty lines in a row end only one."""
        tokens_D = tokens_D[tokens_D > 0]
        if not tokens_D.size:
            return
        self.shortest = min(int(tokens_D.min()), self.shortest) if self.documents else int(tokens_D.min())
        self.longest = max(int(tokens_D.max()), self.longest)
        self.documents += len(tokens_D)
        self.histogram += np.bincount(np.log2(tokens_D).astype(np.int64), minlength=NUM_BINS)

    def add(self, other: Statistics) -> None:
        """Add the counts of another file."""
        if other.documents:
            self.shortest = min(self.shortest, other.shortest) if self.documents else other.shortest
        self.longest = max(self.longest, other.longest)
        for name in ("tokens", "lines", "ends", "documents"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.frequency_V += other.frequency_V
        self.histogram += other.histogram

    @property
    def unknown(self) -> int:
        """The number of tokens that are ``<unk>``."""
        return int(self.frequency_V[Vocabulary.unk])

    def top(self, number: int) -> dict[int, int]:
        """Return the most frequent ids, most frequent first, with their counts."""
        order = np.argsort(-self.frequency_V, kind="stable")[:number]
        return {token: int(self.frequency_V[token]) for token in order.tolist() if self.frequency_V[token]}

    def to_json(self) -> dict[str, Any]:
        """Return everything but the frequencies."""
        bins = {str(2**power): int(count) for power, count in enumerate(self.histogram) if count}
        return {
            **{name: getattr(self, name) for name in ("tokens", "lines", "ends", "documents", "shortest", "longest")},
            "unknown": self.unknown,
            "unknown_share": self.unknown / self.tokens if self.tokens else 0.0,
            "tokens_per_document": (self.tokens - self.ends) / self.documents if self.documents else 0.0,
            "documents_by_tokens": bins,
        }


@dataclass
class Inspection:
    """Statistics by file ("shard00/train"), and what is wrong, a sentence each."""

    vocabulary: Vocabulary
    files: dict[str, Statistics] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def by_split(self) -> dict[str, Statistics]:
        """Return the statistics of all shards together."""
        splits: dict[str, Statistics] = {}
        for name, found in self.files.items():
            splits.setdefault(Path(name).name, Statistics(len(self.vocabulary))).add(found)
        return splits


def shards_of(folder: Path) -> list[Path]:
    """Return the folders of data: ``folder`` itself, or its ``shard*``.

    Raises:
        UserError: there are none.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    if any(folder.glob("*.idx")):
        return [folder]
    shards = sorted(path for path in folder.glob("shard*") if path.is_dir())
    if not shards:
        raise UserError(f"{folder} holds no binary data: neither .idx files nor folders shard*")
    return shards


def bytes_to_read(folder: Path, verify: bool) -> int:
    """Estimate how much :func:`inspect` reads of data that are whole."""
    passes = {".bin": 3, ".idx": 2}  # of an index, the lengths (a third of it) are read four times
    files = [path for path in (file for shard in shards_of(folder) for file in shard.iterdir()) if path.is_file()]
    return sum((passes.get(path.suffix, 0) + verify) * path.stat().st_size for path in files)


def inspect(folder: Path, verify: bool, seen: Callable[[int], None]) -> Inspection:
    """Read everything; ``seen`` is called with every number of bytes that is read.

    Raises:
        UserError: there is nothing to read, or the first dictionary cannot be read.
    """
    shards = shards_of(folder)
    manifest = read_manifest(folder, "binarize") if (folder / MANIFEST).is_file() else None
    needs_document_end = manifest is not None and manifest["settings"].get("format") == "documents"
    first = shards[0] / DICTIONARY
    found = Inspection(Vocabulary.load(first), problems=unfinished([first]))
    for shard in shards:
        if shard != shards[0]:
            found.problems += _dictionary_problems(first, shard / DICTIONARY)
        for path in sorted({path.with_suffix("") for kind in ("idx", "bin") for path in shard.glob(f"*.{kind}")}):
            name = str(path.relative_to(folder))
            try:
                file = TokenFile.open(path, seen)
            except UserError as error:
                found.problems.append(str(error))
                continue
            problems = list(file.problems(len(found.vocabulary), needs_document_end))
            found.problems += problems
            if not problems:
                found.files[name] = Statistics.of(file, len(found.vocabulary))
    if not found.files and not found.problems:
        found.problems.append(f"{folder} holds no binary data: no .idx files")
    if manifest is not None:
        try:
            found.problems += _manifest_problems(folder, manifest, found, verify, seen)
        except (KeyError, TypeError, AttributeError) as error:
            found.problems.append(f"{folder / MANIFEST} is damaged ({type(error).__name__}: {error})")
        except UserError as error:  # it names a file elsewhere
            found.problems.append(str(error))
    return found


def _dictionary_problems(first: Path, other: Path) -> Iterator[str]:
    if not other.is_file():
        yield f"{other} is missing"
    elif other.read_bytes() != first.read_bytes():
        sizes = [len(path.read_bytes()) for path in (other, first)]
        yield f"{other} ({sizes[0]} bytes) is not the same dictionary as {first} ({sizes[1]} bytes)"


def _manifest_problems(
    folder: Path, manifest: dict[str, Any], found: Inspection, verify: bool, seen: Callable[[int], None]
) -> Iterator[str]:
    listed = {row["name"] for row in manifest["outputs"]}
    for name in found.files:
        if f"{name}.bin" not in listed:
            yield f"{folder / name}.bin is not in the manifest"
    paths = output_paths(folder, manifest["outputs"], folder / MANIFEST)
    for row, path in zip(manifest["outputs"], paths, strict=True):
        if not path.is_file():
            if f"{path} is missing" not in found.problems:
                yield f"{path} is missing, but the manifest lists it"
            continue
        if path.stat().st_size != row["bytes"]:
            yield f"{path} has {path.stat().st_size} bytes, the manifest says {row['bytes']}"
        elif verify:
            if (digest := sha256_of(path)) != row["sha256"]:
                yield f"{path} has the SHA-256 {digest}, the manifest says {row['sha256']}"
            seen(row["bytes"])
        statistics = found.files.get(str(Path(row["name"]).with_suffix("")))
        for count in ("tokens", "lines", "ends"):
            if count in row and statistics is not None and getattr(statistics, count) != row[count]:
                yield f"{path} has {getattr(statistics, count)} {count}, the manifest says {row[count]}"
    for split, statistics in found.by_split().items():
        said = manifest["splits"].get(split, {}).get("unknown", 0)
        if statistics.tokens == manifest["splits"].get(split, {}).get("tokens") and statistics.unknown != said:
            yield f"{split} in {folder} has {statistics.unknown} unknown tokens, the manifest says {said}"
    kept = manifest["counts"]["kept"]
    ends = sum(row["ends"] for row in manifest["splits"].values())
    if manifest["settings"]["format"] == "documents" and kept != ends:
        yield f"{folder / MANIFEST} counts {kept} documents kept, but {ends} ends of documents"
