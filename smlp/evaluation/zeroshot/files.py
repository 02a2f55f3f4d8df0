"""Finding and parsing the files of a task; every error is one sentence that names the file."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from smlp import files
from smlp.errors import UserError
from smlp.text.tokenizer import check_characters

#: suffixes of compressed files, read if the plain file is missing
_GZIP = ".gz"
#: suffixes of archives, which are not read but named in the message about a missing file
_COMPRESSED = (".zst", ".xz", ".bz2", ".zip")
#: limit of a decompressed file in bytes: several times the largest of the six tasks
_MOST_BYTES = 1 << 29


def find(data_dir: Path, folders: Sequence[str], names: Sequence[str], source: str) -> Path:
    """Return the first file that exists, in one of the task's folders or in ``data_dir`` itself.

    Args:
        data_dir: what the user gave.
        folders: names that the task's folder may have; any case.
        names: names that the file may have, as released; each may also end in .gz.
        source: where the file comes from, for the message.

    Raises:
        UserError: there is none.
    """
    if not data_dir.is_dir():
        raise UserError(f"--data-dir {data_dir} is not a folder")
    found = next(_candidates(data_dir, folders, names), None)
    if found is not None:
        return found
    expected = " or ".join(str(data_dir / folders[0] / name) for name in names)
    other = next((path for path in _places(data_dir, folders, names) if path.exists()), None)
    if other is not None:
        raise UserError(f"{other} is no regular file")
    compressed = next(_candidates(data_dir, folders, [name + end for name in names for end in _COMPRESSED]), None)
    hint = f"it comes from {source}" if compressed is None else f"{compressed} exists: decompress it"
    raise UserError(f"{expected} is missing; {hint}")


def has_one(data_dir: Path, folders: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether :func:`find` would find a file."""
    return data_dir.is_dir() and any(_candidates(data_dir, folders, names))


def _candidates(data_dir: Path, folders: Sequence[str], names: Sequence[str]) -> Iterator[Path]:
    return filter(Path.is_file, _places(data_dir, folders, names))


def _places(data_dir: Path, folders: Sequence[str], names: Sequence[str]) -> Iterator[Path]:
    """Yield all paths that a file may have, the preferred one first."""
    wanted = {folder.lower() for folder in folders}
    places = [folder for folder in sorted(data_dir.iterdir()) if folder.is_dir() and folder.name.lower() in wanted]
    for name in (*names, *(name + _GZIP for name in names)):
        for place in (*places, data_dir):
            yield place / name


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file with one JSON object per line, each with its place for messages; empty lines are
    skipped.

    Raises:
        UserError: a line is no JSON object, or has half a surrogate pair, or the file is not UTF-8.
    """
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, endless brackets
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise UserError(f"{path}, line {number}: not JSON ({reason})") from None
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {number}: expected a JSON object, found {type(record).__name__}")
        if "\\u" in line:  # only such escapes can produce half a surrogate pair
            try:
                check_characters(json.dumps(record, ensure_ascii=False))
            except UserError as error:
                raise UserError(f"{path}, line {number}: {error}") from None
        yield f"{path}, line {number}", record


def read_text(path: Path) -> str:
    """Return the whole file, decompressed if its name ends with .gz, with any kind of line end as ``\n``.

    Raises:
        UserError: it cannot be read, is damaged, too large or not UTF-8.
    """
    try:
        if path.suffix == _GZIP:
            return files.text_of(_decompressed(path), "utf-8-sig")
        return files.read_text(path, "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: byte {error.start} cannot be read") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _decompressed(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            content = file.read(_MOST_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged, or not a gzip file: {error}") from None
    if len(content) > _MOST_BYTES:
        raise UserError(f"{path} holds more than {_MOST_BYTES:,} bytes: it is not a task's file")
    return content


def text_of(record: dict[str, Any], names: Sequence[str] | str, place: str) -> str:
    """Return a text by its name, or by the first of several names that the record has.

    Raises:
        UserError: there is none, or it is no text.
    """
    names = (names,) if isinstance(names, str) else names
    for name in names:
        if record.get(name) is not None:
            if not isinstance(record[name], str):
                raise UserError(f"{place}: {name!r} must be text, found {record[name]!r}")
            return record[name]
    raise UserError(f"{place}: {' or '.join(map(repr, names))} is missing")


def labels_beside(path: Path) -> Path | None:
    """Return the file with the answers to the records of another file; None if there is none.

    Raises:
        UserError: it is there, but compressed in another way than with gzip.
    """
    labels = labels_path(path)
    if (found := readable_labels(path)) is not None:
        return found
    for there in (labels.with_name(labels.name + end) for end in _COMPRESSED):
        if there.is_file():
            raise UserError(f"{labels} is missing: it has the answers to {path}; {there} exists: decompress it")
    return None


def readable_labels(path: Path) -> Path | None:
    """Return what :func:`labels_beside` finds, or None."""
    labels = labels_path(path)
    return next(filter(Path.is_file, (labels, labels.with_name(labels.name + _GZIP))), None)


def labels_path(path: Path) -> Path:
    """Return the path of the uncompressed file with the answers to the records of another file."""
    return path.with_name(Path(path.name.removesuffix(_GZIP)).stem + "-labels.lst")


def label_of(value: Any, allowed: Collection[int], name: str, place: str) -> int:
    """Return a label that may be given as a number or as text.

    Raises:
        UserError: it is missing, as in test splits whose answers are kept secret, or none of those allowed.
    """
    if value is None or value == "":
        raise UserError(f"{place}: {name!r} is missing: a split without answers cannot be scored")
    text = str(value).strip()
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None
    if isinstance(value, bool) or number not in allowed:
        raise UserError(f"{place}: {name!r} must be one of {', '.join(map(str, sorted(allowed)))}, found {value!r:.40}")
    return number


def label_lines(path: Path, count: int, allowed: Collection[int], beside: Path) -> list[int]:
    """Return the labels of a file, one a line, as many as there are records in the file ``beside``.

    Raises:
        UserError: a line is no label, or there are more or fewer lines.
    """
    lines = read_text(path).split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    if len(lines) != count:
        raise UserError(f"{path} has {len(lines)} labels, {beside} has {count} records")
    return [label_of(line, allowed, "label", f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
