"""Record size and hashes of every document on disk, so that memory does not grow with the corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.flow.documents import NOT_TEXT, ReadSettings, counted_records
from data_prep.flow.manifest import Counts, PartResult
from data_prep.flow.options import cached_tokenizer
from data_prep.flow.parts import FilePart
from data_prep.flow.running import STATE
from data_prep.flow.streams import write_stream
from smlp.errors import UserError

UNITS = ("documents", "bytes", "words", "tokens")
# A document in the survey: its two hashes, its size, and the index of its source within the part. 22 bytes.
ROW = np.dtype([("draw", "<u8"), ("split", "<u8"), ("size", "<u4"), ("source", "<u2")])
BLOCK_ROWS = 1 << 16


@dataclass(frozen=True)
class Measure:
    """Size of a document: ``measure(text)``."""

    # one of ``UNITS``. Tokens are those that ``smlp data binarize`` makes of it: each line with a token in it has a
    # ``</s>``, and a document with such a line one more
    unit: str
    tokenizer: Path | None = None  # folder that ``smlp data tokenizer`` wrote, for tokens

    def __call__(self, text: str) -> int:
        if self.unit == "documents":
            return 1
        if self.unit == "bytes":
            return len(text.encode("utf-8", "surrogatepass"))
        if self.unit == "words":
            return len(text.split())
        ids_N, lengths_L = cached_tokenizer(self.tokenizer).encode_batch(text.split("\n"))
        num_lines = int(np.count_nonzero(lengths_L))
        return len(ids_N) + num_lines + 1 if num_lines else 0

    def reason_against(self, text: str) -> str:
        """Return why a text has no size, "" if it has one: half of a surrogate pair has no tokens."""
        if self.unit == "tokens":
            try:
                text.encode()
            except UnicodeEncodeError:
                return NOT_TEXT
        return ""

    def beginning(self, text: str, size: int) -> str:
        """Return the longest beginning of ``text`` of at most ``size``, cut between words; it may be empty."""
        if self(text) <= size:
            return text
        if self.unit == "documents":
            return ""
        ends = [end + 1 for end in range(len(text) - 1) if not text[end].isspace() and text[end + 1].isspace()]
        low, high = 0, len(ends)  # number of words that certainly fit, and most words that may fit
        while low < high:
            middle = (low + high + 1) // 2
            if self(text[: ends[middle - 1]]) <= size:
                low = middle
            else:
                high = middle - 1
        return text[: ends[low - 1]] if low else ""


def hashes(text: str, seed: int) -> tuple[int, int]:
    """Return two independent numbers below 2**64 that depend on text and seed alone: one draws, one splits."""
    key = seed.to_bytes(8, "little", signed=True)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=key).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def survey_part(part: FilePart, out: Path, *, reading: ReadSettings, measure: Measure, seed: int) -> PartResult:
    """Write a :data:`ROW` for each document of a part."""
    counts, sources = Counts(), {}
    with write_stream(out / STATE / "survey-rows" / f"{part.name}.bin") as (stream, written):
        rows = []
        for piece in counted_records(part, reading, counts):  # defects are reported at the next reading
            if reason := measure.reason_against(piece.text):
                counts.drop(reason)
                continue
            counts.keep()
            source = sources.setdefault(piece.source, len(sources))
            if source > np.iinfo(np.uint16).max:
                raise UserError(f"{part.path} names more than {source:,} sources: a source is a corpus, not a document")
            rows.append((*hashes(piece.text, seed), measure(piece.text), source))
            if len(rows) == BLOCK_ROWS:
                stream.write(np.array(rows, dtype=ROW).tobytes())
                rows = []
        stream.write(np.array(rows, dtype=ROW).tobytes())
    return PartResult([written.row(out)], counts, facts={"sources": list(sources)})


class Survey:
    """The rows of all documents, read in blocks; ``results`` are those of :func:`survey_part`, in order."""

    def __init__(self, out: Path, results: list[PartResult]) -> None:
        self._files = [out / result.outputs[0]["name"] for result in results]
        self.sources = sorted({source for result in results for source in result.facts["sources"]})
        position = {source: index for index, source in enumerate(self.sources)}
        self._source_of = [np.array([position[name] for name in result.facts["sources"]]) for result in results]

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield rows (n,) of :data:`ROW`, their places (n,) in the corpus, and indices (n,) into :attr:`sources`."""
        for index, (path, source_of) in enumerate(zip(self._files, self._source_of, strict=True)):
            with open(path, "rb") as file:
                done = 0
                while content := file.read(BLOCK_ROWS * ROW.itemsize):
                    rows = np.frombuffer(content, dtype=ROW)
                    yield rows, place_of(index, np.arange(done, done + len(rows))), source_of[rows["source"]]
                    done += len(rows)


def place_of(part: int, number: np.ndarray | int) -> np.ndarray | int:
    """Return a document's place: documents of earlier parts come first; a part has at most 2**40."""
    return (part << 40) + number
