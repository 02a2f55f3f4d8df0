"""Read and write documents in files.

Formats, each plain or compressed:

- ``.jsonl``: an object a line, ``{"text": ...}``; ``id`` and ``source`` if known, and any other fields;
- ``.txt``: documents between empty lines (``blank``), or one a line (``line``), or one a file (``file``);
- ``.parquet``: a row each, with a column of text (needs pyarrow).

What cannot be read is reported as a :class:`Loss`, in its place among the documents.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.flow.limits import DEFAULT_SECONDS
from data_prep.flow.manifest import Counts
from data_prep.flow.parts import FilePart
from data_prep.flow.streams import DamagedFile, compression_of, from_extra, json_line, open_stream, suffix_of
from smlp.errors import UserError

FORMATS = (".jsonl", ".txt", ".parquet")
FILES = ".jsonl or .txt, plain, .gz, .zst, .xz or .bz2, or .parquet"
DOCUMENTS_OF_TEXT = ("blank", "line", "file")
NOT_TEXT = "not text: half of a surrogate pair"  # reason to drop text that no tokenizer can encode
_BOM = b"\xef\xbb\xbf"
_ROWS_AT_ONCE, _PARQUET_BYTES = 1000, 1 << 29  # of .parquet, rows and bytes that are unpacked at once
_MOST_LEVELS = 500  # of a .jsonl row: what Python reads it may be unable to write, deeper in its own calls
_PHRASES = {"cut off by damage": "lost where it breaks off"}


@dataclass(frozen=True)
class Record:
    """One document."""

    text: str  # paragraphs between line breaks
    id: str  # ``FILE:NUMBER``, or the file's own id; unique in a corpus
    source: str  # the corpus or file it comes from
    fields: dict[str, Any] = field(default_factory=dict)  # other fields of its line

    def line(self) -> bytes:
        """Return the document as a line of ``.jsonl``."""
        row = {"id": self.id, "source": self.source, "text": self.text, **self.fields}
        return json_line(row)


@dataclass(frozen=True)
class Loss:
    """A document that could not be read, or several in a row."""

    reason: str  # fixed phrase, the key of the counts
    number: int = 1  # of documents


@dataclass(frozen=True)
class Failure(Loss):
    """A document that took too long or crashed a parser: whether it does may depend on the machine, so it is named."""

    where: str = ""


@dataclass(frozen=True)
class Defect:
    """A problem of a file that the manifest names: it is empty or truncated, or documents are lost."""

    problem: str
    where: str


@dataclass(frozen=True)
class ReadSettings:
    """The format of files, and the limits of a document."""

    text_field: str = "text"  # the field or column of the text
    documents_of_text: str = "blank"  # what a document is in ``.txt``: one of ``DOCUMENTS_OF_TEXT``
    max_bytes: int = 16 << 20  # longer documents are dropped; memory is bounded by a small multiple of it
    # of CPU time, in the steps that parse text; a document that takes longer is dropped
    max_seconds: float = DEFAULT_SECONDS


def read(part: FilePart, reading: ReadSettings) -> Iterator[Record | Loss | Defect]:
    """Yield the documents of a part, in order, with losses in their places.

    At the end come the defects of the file, with the number of documents lost for each reason.

    Raises:
        UserError: the format is unknown.
    """
    losses: Counter[str] = Counter()
    for piece in _read(part, reading):
        if isinstance(piece, Loss):
            losses[piece.reason] += piece.number
        yield piece
    for reason, number in losses.items():
        yield Defect(f"{number:,} document{'s' if number > 1 else ''} {_PHRASES.get(reason, reason)}", str(part.path))


def check_format(path: Path) -> None:
    """Raise ``UserError`` if no format of documents ends as a file does."""
    if suffix_of(path) not in FORMATS:
        raise UserError(f"{path}: files of documents end in {FILES}")


def _read(part: FilePart, reading: ReadSettings) -> Iterator[Record | Loss | Defect]:
    check_format(part.path)
    kind = suffix_of(part.path)
    if kind == ".parquet":
        yield from _read_parquet(part, reading)
        return
    if part.path.stat().st_size == 0:
        yield Defect("empty file", str(part.path))
        return
    with open_stream(part.path) as stream:
        lines = _Lines(stream, part, reading.max_bytes)
        empty = True
        for piece in _json_lines(lines, part, reading) if kind == ".jsonl" else _texts(lines, part, reading):
            empty = False
            yield piece
        if lines.damage:
            yield Defect("damaged: it breaks off", lines.damage)
        elif empty and part.start == 0 and part.stop is None:
            yield Defect("no document in it", str(part.path))


class _Lines:
    """Iterate over the lines of a part with their offsets; one longer than ``max_bytes`` comes as None, unread."""

    def __init__(self, stream: BinaryIO, part: FilePart, max_bytes: int) -> None:
        self._stream, self._part, self._max_bytes = stream, part, max_bytes
        self.damage = ""
        self.broken_off = False  # the last line is incomplete because the file is damaged
        self.offset = 0  # of the next line, in bytes of the decompressed file
        if part.start:
            stream.seek(part.start - 1)
            self.offset = part.start - 1
            self._skip_line()

    def __iter__(self) -> Iterator[tuple[int, bytes | None]]:
        while True:
            start = self.offset
            try:
                line = self._stream.readline(self._max_bytes + len(b"\r\n") + (len(_BOM) if start == 0 else 0))
                self.offset += len(line)
                line = line.removeprefix(_BOM) if start == 0 else line
                if len(line.removesuffix(b"\n").removesuffix(b"\r")) > self._max_bytes:
                    if not line.endswith(b"\n"):
                        self._skip_line()
                    line = None
            except DamagedFile as error:
                self.damage, self.broken_off = str(error), True
                yield start, None
                return
            if line == b"":
                return
            yield start, line

    def _skip_line(self) -> None:
        while True:
            line = self._stream.readline(1 << 20)
            self.offset += len(line)
            if not line or line.endswith(b"\n"):
                return


def _json_lines(lines: _Lines, part: FilePart, reading: ReadSettings) -> Iterator[Record | Loss]:
    for offset, line in lines:
        if part.stop is not None and offset >= part.stop:
            return
        if line is None:
            yield Loss("cut off by damage" if lines.broken_off else too_long_for(reading))
            continue
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))  # of bytes, it also reads surrogates
        except UnicodeDecodeError:
            yield Loss("not UTF-8")
            continue
        except RecursionError:
            yield Loss(f"nested deeper than {_MOST_LEVELS} levels")
            continue
        except ValueError:
            yield Loss("not JSON")
            continue
        if line.count(b"[") + line.count(b"{") > _MOST_LEVELS and _is_deeper(row, _MOST_LEVELS):
            yield Loss(f"nested deeper than {_MOST_LEVELS} levels")
        else:
            yield document_of_row(row if isinstance(row, dict) else {}, offset, part, reading)


def _is_deeper(value: Any, most: int) -> bool:
    """Return whether lists and objects are nested in more than ``most`` levels."""
    level, number = [value], -1
    while level:
        level = [
            part
            for one in level
            if isinstance(one, (list, dict))
            for part in (one.values() if isinstance(one, dict) else one)
        ]
        number += 1
    return number > most


def _texts(lines: _Lines, part: FilePart, reading: ReadSettings) -> Iterator[Record | Loss]:
    """Yield the documents of ``.txt``. In ``blank``, a part owns those after the first empty line that begins in it."""
    mode = reading.documents_of_text
    waiting = mode == "blank" and part.start > 0  # text before the first empty line belongs to the previous part
    collected: list[bytes] = []
    first, size, too_long = 0, 0, False

    def finished() -> Iterator[Record | Loss]:
        if too_long:
            yield Loss(too_long_for(reading))
        elif collected:
            yield _decoded(b"".join(collected), first, part)

    for offset, line in lines:
        past = part.stop is not None and offset >= part.stop
        if past and mode == "line":
            return
        if lines.broken_off:
            yield Loss("cut off by damage")
            return
        blank = line is not None and not line.strip()
        if mode == "line":
            if not blank:
                yield Loss(too_long_for(reading)) if line is None else _decoded(line, offset, part)
            continue
        if blank and mode == "blank":
            if not waiting:
                yield from finished()
            collected, size, too_long, waiting = [], 0, False, False
            if past:
                return
            continue
        if waiting and past:  # no empty line begins in the part
            return
        if waiting or (blank and not collected and not too_long):
            continue
        if not collected and not too_long:
            first = offset
        size += reading.max_bytes + 2 if line is None else len(line) - line.endswith(b"\r\n")
        if size - (line is None or line.endswith(b"\n")) > reading.max_bytes:  # the last line's end does not count
            collected, too_long = [], True
        elif not too_long:
            collected.append(line)
    if not waiting:
        yield from finished()


def _decoded(content: bytes, offset: int, part: FilePart) -> Record | Loss:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return Loss("not UTF-8")
    return Record(text.replace("\r\n", "\n").rstrip("\n"), f"{part.prefix}:{offset}", part.source)


def too_long_for(reading: ReadSettings) -> str:
    """Return the reason to drop a document that is longer than allowed."""
    return f"longer than {reading.max_bytes:,} bytes"


def _read_parquet(part: FilePart, reading: ReadSettings) -> Iterator[Record | Loss | Defect]:
    if compression_of(part.path):
        yield Defect("a .parquet file that is compressed as a whole: unpack it", str(part.path))
        return
    pyarrow, parquet = (from_extra(name, f"{part.path}: for .parquet") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        file = parquet.ParquetFile(part.path, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        _raise_if_of_disk(error, part.path)
        yield Defect("damaged: no parquet file", f"{part.path}: {' '.join(str(error).split())}")
        return
    with file:
        if reading.text_field not in file.schema_arrow.names:
            yield Defect(f"no column {reading.text_field!r}: {', '.join(file.schema_arrow.names)}", str(part.path))
            if file.metadata.num_rows:
                yield Loss(f"no text in field {reading.text_field!r}", file.metadata.num_rows)
            return
        if file.schema_arrow.names.count(reading.text_field) > 1:
            yield Defect(f"several columns {reading.text_field!r}", str(part.path))
            if file.metadata.num_rows:
                yield Loss(f"several columns {reading.text_field!r}", file.metadata.num_rows)
            return
        if not file.metadata.num_rows:
            yield Defect("no document in it", str(part.path))
        number = 0
        try:
            for group in range(file.metadata.num_row_groups):
                # A value that is stored once for many rows is copied for each row of a batch.
                size = max(file.metadata.row_group(group).total_byte_size, 1)
                at_once = max(1, min(_ROWS_AT_ONCE, _PARQUET_BYTES // size))
                for batch in file.iter_batches(batch_size=at_once, row_groups=[group]):
                    for rows in _bounded(batch, max(_PARQUET_BYTES, 2 * reading.max_bytes)):
                        if rows is None:
                            yield Loss(too_long_for(reading))
                            number += 1
                            continue
                        for row in _rows(rows):
                            yield document_of_row(in_json(row, reading), number, part, reading)
                            number += 1
        except (pyarrow.ArrowException, OSError) as error:
            _raise_if_of_disk(error, part.path)
            yield Loss("cut off by damage", file.metadata.num_rows - number)
            yield Defect("damaged: it breaks off", f"{part.path}: {' '.join(str(error).split())}")


def _raise_if_of_disk(error: Exception, path: Path) -> None:
    """Raise an error of the disk, which may pass, with the file's name; pyarrow's own have no number."""
    if isinstance(error, OSError) and error.errno is not None:
        error.filename = str(path)
        raise error


def _bounded(batch: Any, most: int) -> Iterator[Any]:
    """Yield a batch of pyarrow; if it has more bytes, its rows one by one, with None for those that alone have more.

    Few bytes of a file can mean millions of values.
    """
    if batch.nbytes <= most:
        yield batch
        return
    for row in (batch.slice(number, 1) for number in range(batch.num_rows)):
        own = (part.dictionary_decode() if hasattr(part, "dictionary") else part for part in row.columns)
        yield row if sum(part.nbytes for part in own) <= most else None


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch of pyarrow; None stands for a value that Python cannot have."""
    try:
        rows = batch.to_pylist()
    except MemoryError:
        raise
    except Exception:  # OverflowError for a date, UnicodeDecodeError, UnknownTimeZoneError of pytz, ...
        rows = None
    yield from rows or ()
    for number in range(batch.num_rows if rows is None else 0):
        row: dict[str, Any] = dict.fromkeys(batch.schema.names)
        for name in row:
            try:
                row[name] = batch.column(name)[number].as_py()
            except MemoryError:
                raise
            except Exception:  # the value stays None
                continue
        yield row


def in_json(row: dict[str, Any], reading: ReadSettings) -> dict[str, Any]:
    """Return the row of a table with values that JSON lacks, such as dates, as strings; the text stays as it is."""
    return {name: value if name == reading.text_field else _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, (list, tuple)):  # a map is a list of pairs
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def document_of_row(row: dict[str, Any], number: int, part: FilePart, reading: ReadSettings) -> Record | Loss:
    """Return the document of a row, which is ``number`` in the part's file, or begins at byte ``number``."""
    text = row.pop(reading.text_field, None)
    if not isinstance(text, str):
        return Loss(f"no text in field {reading.text_field!r}")
    if len(text.encode("utf-8", "surrogatepass")) > reading.max_bytes:
        return Loss(too_long_for(reading))
    given, source = row.pop("id", None), row.pop("source", None)
    identity = f"{part.prefix}:{number}" if given is None else str(given)
    source = part.source if source is None else str(source)
    return Record(text, identity, source, {key: value for key, value in row.items() if key != "text"})


def counted_records(
    part: FilePart, reading: ReadSettings, counts: Counts, defects: list[dict[str, str]] | None = None
) -> Iterator[Record]:
    """Yield the documents of a part, in order.

    Losses are dropped in ``counts`` by their reasons; the caller counts the documents themselves. ``defects`` receives
    those of the file; it is None if another phase of the step reads the file too, and reports them.
    """
    for piece in read(part, reading):
        if isinstance(piece, Record):
            yield piece
        elif isinstance(piece, Loss):
            counts.drop(piece.reason, piece.number)
        elif isinstance(piece, Defect) and defects is not None:
            defects.append({"problem": piece.problem, "where": piece.where})
