"""Read the description of a corpus from a small TOML file, a name on the Hub, or a place on disk."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from data_prep.fetch.download import ALGORITHMS, RemoteFile
from data_prep.flow.documents import DOCUMENTS_OF_TEXT
from data_prep.flow.parts import name_of
from smlp.errors import UserError
from smlp.files import read_text

FOLDER = Path(__file__).resolve().parents[1] / "sources"
FORMATS = ("wikipedia", "warc", "jsonl", "txt", "parquet")
LISTINGS = ("paths", "checksums", "dumpstatus")
STATUSES = ("available", "gone")
_DIGITS = {"sha256": 64, "sha1": 40, "md5": 32}  # of a checksum of each algorithm
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Size:
    """Size of a corpus, if it is known; ``basis`` says from what. ``bytes`` are those to download."""

    bytes: int | None = None
    files: int | None = None
    text_bytes: int | None = None
    documents: int | None = None
    tokens: int | None = None
    basis: str = ""


@dataclass(frozen=True)
class Listing:
    """A list of a source's files."""

    # ``paths``: a text file of addresses, one a line; ``checksums``: lines of a checksum and a name, as sha256sum
    # writes them; ``dumpstatus``: Wikimedia's JSON
    kind: str
    # of the list; ``{option}`` stands for an option's value, ``{year}`` and ``{month}`` for each of ``months``
    url: str
    base: str = ""  # address that the lines of ``paths`` and ``checksums`` are relative to; "" for the list's own
    pattern: str = ""  # regular expression that file names must contain
    job: str = ""  # of ``dumpstatus``, whose files are wanted
    algorithm: str = "sha256"  # of ``checksums``
    # page whose links are the available dates; the option ``date = "latest"`` takes the newest
    dates: str = ""


@dataclass(frozen=True)
class Hub:
    """A dataset for ``datasets``: a name on the Hugging Face Hub, or a folder."""

    name: str
    config: str = ""
    split: str = "train"
    revision: str = ""
    rows_per_document: int = 1


@dataclass(frozen=True)
class Source:
    """A corpus. It has exactly one of ``files``, ``listing``, ``hub`` and ``paths``, unless it is gone."""

    name: str
    title: str
    format: str = ""
    status: str = "available"
    replacement: tuple[str, ...] = ()
    licence: str = "not stated"
    citation: str = ""
    notes: tuple[str, ...] = ()
    text_field: str = "text"
    documents: str = "blank"
    size: Size = field(default_factory=Size)
    options: dict[str, str] = field(default_factory=dict)
    files: tuple[RemoteFile, ...] = ()
    listing: Listing | None = None
    hub: Hub | None = None
    paths: tuple[Path, ...] = ()
    definition: str = ""

    @property
    def kind(self) -> str:
        """The kind of place it comes from, in a word."""
        if self.status == "gone":
            return "-"
        return "hub" if self.hub else "folder" if self.paths else "web"

    @property
    def from_web(self) -> bool:
        return bool(self.files or self.listing)


def built_in() -> dict[str, Source]:
    """Return the sources that come with the package, by name."""
    return {path.stem: read_source(path) for path in sorted(FOLDER.glob("*.toml"))}


def find_source(name: str) -> Source:
    """Return the source that an argument of the command line names.

    Raises:
        UserError: there is no such source, or its file is wrong.
    """
    if name.startswith("hf:"):
        return _of_hub(name)
    path = Path(name)
    if path.suffix == ".toml":
        return read_source(path)
    sources = built_in()
    if name in sources:
        return sources[name]
    if path.exists():
        stem = path.resolve().name if path.is_dir() else name_of(path)
        return Source(_safe(stem), f"files of {name}", licence="the user's own", paths=(path,), definition=name)
    close = difflib.get_close_matches(name, sources, n=1)
    hint = f"did you mean {close[0]}?" if close else "'smlp data fetch --list' shows the available ones"
    raise UserError(f"there is no source, file or folder {name!r}: {hint}")


def _of_hub(word: str) -> Source:
    name, config, split, *more = [*word.removeprefix("hf:").split(":"), "", ""][:4]
    if not name or any(more) or word.count(":") > 3:
        raise UserError(f"{word!r} is not hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or hf:OWNER/NAME:CONFIG:SPLIT")
    hub = Hub(name, config, split or "train")
    stem = "--".join(filter(None, [*Path(name).parts[-2:], config, split])).replace("/", "")
    return Source(_safe(stem), f"{name} on the Hub", licence="see its page on the Hub", hub=hub, definition=word)


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "documents"


def read_source(path: Path) -> Source:
    """Read a source file.

    Raises:
        UserError: it is missing, is not TOML, or a field is missing, unknown or wrong; the message names the field.
    """
    try:
        content = read_text(path)
        row = tomllib.loads(content)
        repr(row)  # a hexadecimal number may have more digits than Python prints
    except OSError as error:
        raise UserError(f"source file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # bad UTF-8 or bad TOML
        raise UserError(f"source file {path} is not TOML: {error}") from None
    try:
        return _checked(_parsed(row, path, content))
    except _Wrong as error:
        raise UserError(f"source file {path}: {error}") from None


class _Wrong(Exception):
    pass


def _parsed(row: dict[str, Any], path: Path, content: str) -> Source:
    values = dict(row)
    values.setdefault("name", path.stem)
    for name in ("replacement", "notes"):
        values[name] = tuple(_list_of(str, values.get(name, []), name))
    values["size"] = _record(Size, values.get("size", {}), "size")
    for name, kind in (("listing", Listing), ("hub", Hub)):
        if name in values:
            values[name] = _record(kind, values[name], name)
    options = values.get("options", {})
    if not isinstance(options, dict) or not all(isinstance(value, str) for value in options.values()):
        raise _Wrong("'options' must be a table of strings")
    if dotted := [name for name in options if "." in name]:
        raise _Wrong(f"the name of an option must not have a dot, but there is {dotted[0]!r}")
    values["files"] = tuple(map(_remote, _list_of(dict, values.get("files", []), "files")))
    values["paths"] = tuple(path.parent / place for place in _list_of(str, values.get("paths", []), "paths"))
    return _record(Source, {**values, "definition": content}, "")


def _list_of(kind: type, value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise _Wrong(f"{name!r} must be a list of {'tables' if kind is dict else 'strings'}")
    return value


def _record(kind: type, row: Any, where: str) -> Any:
    """Make a dataclass from a table; plain fields are strings or whole numbers, as their annotations say."""
    if not isinstance(row, dict):
        raise _Wrong(f"{where!r} must be a table")
    known = {item.name: item for item in fields(kind)}
    prefix = f"{where}." if where else ""
    for name, value in row.items():
        if name not in known:
            raise _Wrong(f"unknown field {prefix + name!r}; there are {', '.join(known)}")
        kind_of_field = str(known[name].type)
        if kind_of_field in ("int", "int | None"):
            _check_number(prefix + name, value)
        elif kind_of_field == "str" and not isinstance(value, str):
            raise _Wrong(f"{prefix + name!r} must be a string, not {value!r}")
    try:
        return kind(**row)
    except TypeError as error:
        raise _Wrong(f"a field is missing: {str(error).partition('missing ')[2] or error}") from None


def _check_number(name: str, value: Any) -> None:
    if type(value) is not int:
        raise _Wrong(f"{name!r} must be a whole number, not {value!r}")
    if value < 0:
        raise _Wrong(f"{name!r} must be at least 0, not {value}")
    if value >= 2**63:
        raise _Wrong(f"{name!r} must be below 2**63, not {value!r:.80}")


def is_checksum(text: str, algorithm: str) -> bool:
    """Return whether a text has as many hexadecimal digits as a checksum of an algorithm."""
    return re.fullmatch(f"[0-9a-fA-F]{{{_DIGITS[algorithm]}}}", text) is not None


def _check_address(name: str, url: str) -> None:
    try:
        has_user = urlsplit(url).username is not None
    except ValueError:  # no address, which the download says
        return
    if has_user:
        raise _Wrong(f"{name!r} has a user name or a password, which records would show: leave it out")


def _remote(row: dict[str, Any]) -> RemoteFile:
    known = {"url", "bytes", *ALGORITHMS}
    if unknown := set(row) - known:
        raise _Wrong(f"unknown field 'files.{min(unknown)}'; there are {', '.join(sorted(known))}")
    if not isinstance(row.get("url"), str):
        raise _Wrong("each of 'files' must have a 'url'")
    for name in row.keys() & {*ALGORITHMS}:
        if not isinstance(row[name], str):
            raise _Wrong(f"'files.{name}' must be a string, not {row[name]!r}")
        if not is_checksum(row[name], name):
            raise _Wrong(f"'files.{name}' must be {_DIGITS[name]} hexadecimal digits, not {row[name]!r}")
    _check_number("files.bytes", row.get("bytes", 0))
    _check_address("files.url", row["url"])
    digests = [(algorithm, row[algorithm]) for algorithm in ALGORITHMS if algorithm in row]
    return RemoteFile(row["url"], "", row.get("bytes"), digests[0] if digests else None)


def _checked(source: Source) -> Source:
    def one_of(name: str, value: str, choices: Iterable[str]) -> None:
        if value not in choices:
            raise _Wrong(f"{name!r} is {value!r}, but must be one of {', '.join(choices)}")

    if not _NAME.fullmatch(source.name):
        raise _Wrong(f"'name' is {source.name!r}, but a folder's name has only letters, digits, '.', '-' and '_'")
    one_of("status", source.status, STATUSES)
    one_of("documents", source.documents, DOCUMENTS_OF_TEXT)
    places = [name for name in ("files", "listing", "hub", "paths") if getattr(source, name)]
    if source.status == "gone":
        if places:
            raise _Wrong(f"'status' is 'gone', so {places[0]!r} must not be there")
        return source
    if len(places) != 1:
        there = f"there are {' and '.join(places)}" if places else "there is none"
        raise _Wrong(f"exactly one of 'files', 'listing', 'hub' and 'paths' must say where the data are; {there}")
    if source.from_web:
        one_of("format", source.format, FORMATS)
    elif source.format:
        raise _Wrong("'format' is only for files from the web: 'hub' and 'paths' imply theirs")
    if source.listing:
        one_of("listing.kind", source.listing.kind, LISTINGS)
        one_of("listing.algorithm", source.listing.algorithm, ALGORITHMS)
        for name in ("url", "base"):
            _check_address(f"listing.{name}", getattr(source.listing, name))
        try:
            re.compile(source.listing.pattern)
        except re.error as error:
            raise _Wrong(f"'listing.pattern' is no regular expression: {error}") from None
    if source.hub and not source.hub.name:
        raise _Wrong("'hub.name' must not be empty")
    if source.hub and source.hub.rows_per_document < 1:
        raise _Wrong(f"'hub.rows_per_document' must be at least 1, not {source.hub.rows_per_document}")
    return source
