"""List the files of a source on the web: read once, then kept, so that a repeated command means the same files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from string import Formatter
from urllib.parse import quote, unquote, urljoin, urlsplit

from data_prep.fetch.download import DownloadFailed, NotThere, Patience, RemoteFile, download, from_json
from data_prep.fetch.source import Listing, Source, is_checksum
from data_prep.flow.streams import DamagedFile, compression_of, read_json, read_unpacked, suffix_of, write_bytes
from smlp.errors import UserError

KEPT = "listing.json"
_OWN_NAMES = (KEPT, "shards.json")
_OWN_ENDING = re.compile(r"\.((partial|request)(\.json)?)$")  # of files beside one that is downloaded or read
_DATE_LINK = re.compile(r'href="(\d{4}-?\d{2}-?\d{2})/?"')
_NAME_BYTES = 200  # of a file's name; file systems allow 255, with what is added while a file is written
_MONTH = re.compile(r"(\d{4})-(0[1-9]|1[0-2])")


class _NotComplete(UserError):
    """A list that is not there yet, or not finished."""


def kept_files(source: Source, options: dict[str, str], folder: Path) -> list[RemoteFile] | None:
    """Return the files that an earlier :func:`list_files` found with the same options, or None."""
    row = read_json(folder / KEPT)
    if row is None or row.get("definition") != source.definition or row.get("options") != options:
        return None
    try:
        files = [from_json(file) for file in row["files"]]
        # earlier versions kept names without formats, of which two can become one
        files = [replace(file, name=named_by_format(file.name, source.format)) for file in files]
        return files if len({file.name for file in files}) == len(files) else None
    except (KeyError, TypeError):  # damaged: request it again
        return None


def list_files(
    source: Source, options: dict[str, str], folder: Path, patience: Patience, anew: bool = False
) -> list[RemoteFile]:
    """Return the files of a source of the web, in a fixed order and with names of their own; keep them in ``folder``.

    ``anew`` reads the list even if it has been kept.

    Raises:
        UserError: the list cannot be downloaded or read, or an option is wrong.
    """
    if not anew and (kept := kept_files(source, options, folder)) is not None:
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    if source.listing is None:
        files = list(source.files)
    elif options.get("date") == "latest":
        files = _latest(source.listing, options, folder, patience)
    else:
        files = _listed(source.listing, options, folder, patience)
    if not files:
        raise UserError(f"source {source.name}: its list names no file")
    files = named(files, source.format)
    row = {"definition": source.definition, "options": options, "files": [asdict(file) for file in files]}
    write_bytes(folder / KEPT, json.dumps(row, indent=1).encode())
    return files


def _latest(listing: Listing, options: dict[str, str], folder: Path, patience: Patience) -> list[RemoteFile]:
    """Return the files of the newest date that is complete."""
    if not listing.dates:
        raise UserError("date=latest needs 'listing.dates' in the source's file: give a date with --set")
    page = _filled(listing.dates, options)
    dates = sorted(set(_DATE_LINK.findall(_text(page, folder, patience))), reverse=True)
    problem = f"no link to a date on {page}"
    for date in dates:
        try:
            return _listed(listing, {**options, "date": date}, folder, patience)
        except _NotComplete as error:
            problem = str(error)
    raise UserError(f"no complete files for date=latest: {problem}")


def _listed(listing: Listing, options: dict[str, str], folder: Path, patience: Patience) -> list[RemoteFile]:
    values = [options]
    if "months" in options:
        values = [{**options, "year": year, "month": month} for year, month in months(options["months"])]
    files: list[RemoteFile] = []
    for value in values:
        url = _filled(listing.url, value)
        text = _text(url, folder, patience)
        files += _READERS[listing.kind](text, url, replace(listing, base=_filled(listing.base, value)))
    return [file for file in files if re.search(listing.pattern, _base_name(file.url))]


def _paths(text: str, url: str, listing: Listing) -> list[RemoteFile]:
    return [RemoteFile(_joined(listing.base or url, line.strip()), "") for line in text.splitlines() if line.strip()]


def _checksums(text: str, url: str, listing: Listing) -> list[RemoteFile]:
    files = []
    for line in filter(str.strip, text.splitlines()):
        digest, _, name = line.strip().partition(" ")
        if not is_checksum(digest, listing.algorithm) or not name.strip():
            raise UserError(f"{url} is not a list of {listing.algorithm} checksums: it has the line {line[:80]!r}")
        name = name.strip().removeprefix("*")  # of a file, in which no sign means what it does in an address
        name = name if re.match("https?://", name, re.IGNORECASE) else quote(name, safe="/~!$&'()*+,;=@")
        place = _joined(listing.base or url, name)
        files.append(RemoteFile(place, "", None, (listing.algorithm, digest.lower())))
    return files


def _dumpstatus(text: str, url: str, listing: Listing) -> list[RemoteFile]:
    try:
        job = json.loads(text)["jobs"][listing.job]
        status, rows = job["status"], job.get("files", {})
        if status != "done":
            raise _NotComplete(f"{url}: the job {listing.job!r} is not finished there, its status is {status!r}")
        for row in rows.values():
            size, sha1 = row["size"], row.get("sha1")
            if not (size is None or (type(size) is int and size >= 0)) or (sha1 and not is_checksum(sha1, "sha1")):
                raise UserError(f"{url}: the job {listing.job!r} has a file of size {size!r} and sha1 {sha1!r}")
        return [
            RemoteFile(place, "", row["size"], ("sha1", row["sha1"]) if row.get("sha1") else None)
            for _, row in sorted(rows.items(), key=lambda item: _numbers_apart(item[0]))
            for place in [_joined(listing.base or url, row["url"])]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{url} is not the status of a dump with the job {listing.job!r}") from None


def _numbers_apart(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts part 2 before part 10."""
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", name)]


_READERS = {"paths": _paths, "checksums": _checksums, "dumpstatus": _dumpstatus}


def months(text: str) -> list[tuple[str, str]]:
    """Return the pairs of year and month of ``2016-09:2019-02`` or of a single month.

    Raises:
        UserError: it is neither.
    """
    first, colon, last = text.partition(":")
    bounds = [_MONTH.fullmatch(bound) for bound in (first, last if colon else first)]
    if None in bounds:
        raise UserError(f"option months is {text!r}, but must be a month, as 2016-09, or two, as 2016-09:2019-02")
    start, stop = (int(bound[1]) * 12 + int(bound[2]) - 1 for bound in bounds)
    if start > stop:
        raise UserError(f"option months is {text!r}: {first} comes after {last}")
    return [(f"{month // 12:04}", f"{month % 12 + 1:02}") for month in range(start, stop + 1)]


def _filled(template: str, options: dict[str, str]) -> str:
    try:
        formats = [(name, wanted) for _, name, wanted, _ in Formatter().parse(template) if wanted]
        long = [name for name, wanted in formats if "{" in wanted or re.search(r"\d{3}", wanted)]
        filled = "" if long else template.format(**options)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f"the address {template!r} has a placeholder without an option: {error}") from None
    if long:  # such as one of a billion spaces
        raise UserError(f"the address {template!r} has a format of {{{long[0]}}} with another placeholder or above 99")
    return filled


def _text(url: str, folder: Path, patience: Patience) -> str:
    # tasks of an array request it at the same time
    name = _cut(f"list-{socket.gethostname()}-{os.getpid()}-{_base_name(url)}")
    path = folder / name
    try:
        download(RemoteFile(url, name), path, patience)
        return read_unpacked(path).decode("utf-8-sig")
    except NotThere as error:
        raise _NotComplete(str(error)) from None
    except DownloadFailed as error:
        raise UserError(str(error)) from None
    except (DamagedFile, UnicodeDecodeError) as error:
        raise UserError(f"the list {url} is damaged: {error}") from None
    finally:
        for ending in ("", ".partial", ".partial.json"):  # no other process would resume it
            path.with_name(path.name + ending).unlink(missing_ok=True)


def _joined(base: str, address: str) -> str:
    try:
        return urljoin(base, address)
    except ValueError as error:
        raise UserError(f"{address!r} is not the address of a file: {error}") from None


def _base_name(url: str) -> str:
    try:
        path = urlsplit(url).path
    except ValueError as error:
        raise UserError(f"{url!r} is not the address of a file: {error}") from None
    name = unquote(path).rstrip("/").rpartition("/")[2].replace("\0", "")
    if name in _OWN_NAMES or name.startswith("."):  # files of smlp data fetch itself, and files that later steps skip
        return f"file-{name}" if name.strip(".") else "index"
    return _OWN_ENDING.sub(r"-\1", name) or "index"


def _cut(name: str) -> str:
    """Return a name that is not too long for a file: the end of a longer one, which has its format, and a checksum."""
    content = name.encode("utf-8", "replace")
    if len(content) <= _NAME_BYTES:
        return name
    digest = hashlib.sha256(content).hexdigest()[:16]
    return f"{digest}-{content[len(digest) + 1 - _NAME_BYTES :].decode('utf-8', 'ignore')}"


def named_by_format(file_name: str, form: str) -> str:
    """Return the name under which a file of documents is stored: its suffix must say what it is."""
    if form not in ("jsonl", "txt", "parquet") or suffix_of(Path(file_name)) == f".{form}":
        return file_name
    path = Path(file_name)
    return f"{path.stem}.{form}{path.suffix}" if compression_of(path) else f"{file_name}.{form}"


def named(files: list[RemoteFile], form: str) -> list[RemoteFile]:
    """Name files by the last part of the URL and their format, numbered where two are the same; a URL counts once."""
    once: dict[str, RemoteFile] = {}
    for file in files:
        if file.url not in once or not once[file.url].digest:
            once[file.url] = file
    files = list(once.values())
    names = [_cut(named_by_format(_base_name(file.url), form)) for file in files]
    taken, copies, found = set(names), Counter[str](), []
    for file, base in zip(files, names, strict=True):
        copies[base] += 1
        name = base if copies[base] == 1 else f"{copies[base]}-{base}"
        while copies[base] > 1 and name in taken:
            copies[base] += 1
            name = f"{copies[base]}-{base}"
        taken.add(name)
        found.append(replace(file, name=name))
    return found
