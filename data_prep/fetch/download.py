"""Download files over HTTP: resumed where they broke off, retried, and checked before they get their names."""

from __future__ import annotations

import email.utils
import hashlib
import io
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.flow.streams import from_extra, read_json
from data_prep.flow.workers import bytes_bar
from smlp import __version__
from smlp.files import NamedFile, plain_name

ALGORITHMS = ("sha256", "sha1", "md5")
_AGENT = f"smlp/{__version__} (smlp data fetch)"
_CHUNK = 256 << 10
_LENGTH = r"[0-9]{1,18}"  # of a file, as a server says it
_TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_CODINGS = ("gzip", "x-gzip", "deflate", "compress", "br", "zstd")
_PLAIN = (".txt", ".jsonl", ".parquet")  # suffixes of files whose content is read as it comes


class DownloadFailed(Exception):
    """A file cannot be downloaded. The message is one sentence with its URL."""


class NotThere(DownloadFailed):
    """The server has no such file."""


@dataclass(frozen=True)
class RemoteFile:
    """A file to download."""

    url: str  # address
    name: str  # file name, unique in its source
    num_bytes: int | None = None  # length, if the list has it
    digest: tuple[str, str] | None = None  # ``(algorithm, hexadecimal)``, if the list has it; one of ``ALGORITHMS``


@dataclass(frozen=True)
class Patience:
    """Limits of retrying."""

    attempts: int = 6  # consecutive failures without a new byte
    first_wait: float = 1.0  # seconds to wait after the first failure; doubled after each further one
    longest_wait: float = 120.0  # limit in seconds, also of ``Retry-After``
    timeout: float = 60.0  # seconds without any byte until an attempt fails


class _Passing(Exception):
    """An attempt failed for a reason that may pass.

    ``wait`` is what the server asks for, in seconds; ``lost`` are bytes that had to be thrown away.
    """

    def __init__(self, problem: str, wait: float = 0.0, lost: int = 0) -> None:
        super().__init__(problem)
        self.wait, self.lost = wait, lost


@dataclass
class _Partial:
    """The downloaded bytes of a file, and the version that the server gave for them."""

    path: Path

    def __post_init__(self) -> None:
        for path in (self.path, self._memo):  # a link, to whose file the bytes would go, or a pipe that blocks
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                path.unlink()

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    @property
    def _memo(self) -> Path:
        return self.path.with_name(self.path.name + ".json")

    def version(self, url: str) -> str:
        """Return the validator for the version of these bytes, or "" if there is none for this URL."""
        row = read_json(self._memo) or {}
        return row["version"] if row.get("url") == url else ""

    def begin(self, url: str, version: str) -> None:
        """Throw away the bytes that are there, and note the version to come."""
        self.path.write_bytes(b"")
        self._memo.write_text(json.dumps({"url": url, "version": version}), encoding="utf-8")

    def discard(self) -> int:
        """Throw away the bytes that are there; return their number."""
        size = self.size
        self.path.unlink(missing_ok=True)
        self._memo.unlink(missing_ok=True)
        return size

    def keep_as(self, path: Path) -> None:
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self.path, path)
        self._memo.unlink(missing_ok=True)


def download(
    file: RemoteFile,
    path: Path,
    patience: Patience,
    advance: Callable[[int], Any] = lambda num_bytes: None,
    stop: threading.Event | None = None,
) -> None:
    """Write ``path``, whole and checked, or not at all; until then, ``NAME.partial`` holds the bytes so far.

    The partial file of an earlier call is resumed if the server still has the same version (``If-Range`` with its
    ``ETag`` or date, or a checksum to find out at the end), so that no file is glued together from two.

    ``advance`` is called with the number of new bytes, a negative one for bytes that had to be thrown away. Once
    ``stop`` is set, the download ends with DownloadFailed; the bytes so far stay.

    Raises:
        DownloadFailed: the download failed; the message names URL, reason and numbers.
        UserError: ``requests`` is not installed.
    """
    partial = _Partial(path.with_name(path.name + ".partial"))
    stop = stop or threading.Event()
    furthest, failures = 0, 0  # not those that are there: the server may have another version
    while True:
        if stop.is_set():
            raise DownloadFailed(f"{file.url}: stopped after {partial.size:,} bytes")
        try:
            _attempt(file, partial, patience, advance, stop)
            if problem := difference(file, partial.path):
                raise _Passing(problem, lost=partial.discard())  # to be downloaded again
            break
        except _Passing as passing:
            advance(-passing.lost)
            if partial.size > furthest:
                furthest, failures = partial.size, 0
            failures += 1
            if failures >= patience.attempts:
                raise DownloadFailed(f"{file.url}: {passing}; gave up after {failures} attempts") from None
            wait = max(passing.wait, patience.first_wait * 2.0 ** min(failures - 1, 60))
            stop.wait(min(wait, patience.longest_wait))
    partial.keep_as(path)


def _attempt(
    file: RemoteFile, partial: _Partial, patience: Patience, advance: Callable[[int], Any], stop: threading.Event
) -> None:
    """Fetch the missing bytes; return when the file is complete, as far as server and list can say."""
    requests, urllib3 = (from_extra(name, "for downloads") for name in ("requests", "urllib3"))
    total: int | None = None
    have, version = partial.size, partial.version(file.url)
    headers = {"User-Agent": _AGENT, "Accept-Encoding": "identity"}
    if have and (version or file.digest):
        headers["Range"] = f"bytes={have}-"
        if version:
            headers["If-Range"] = version
    passing = (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, ConnectionError, TimeoutError)
    try:
        with _answer(file.url, headers, patience) as response:
            total, resumed = _accepted(file, partial, response)
            if total is not None and file.num_bytes not in (None, total):
                raise DownloadFailed(
                    f"{file.url}: its list says {file.num_bytes:,} bytes, the server has {total:,}: one of them changed"
                )
            if not resumed:
                advance(-have)
                partial.begin(file.url, _version_of(response.headers))
            have = partial.size
            if response.status_code == 416:  # nothing is left, and the body is a message
                return
            with io.BufferedWriter(NamedFile(partial.path, "ab")) as out:
                while total is None or have < total + resumed:  # a part once more, to see its end
                    if stop.is_set():
                        raise DownloadFailed(f"{file.url}: stopped after {have:,} bytes")
                    content = response.raw.read1(_CHUNK, decode_content=False)  # whatever is available
                    if not content:
                        break
                    out.write(content)
                    have += len(content)
                    advance(len(content))
    except passing as error:
        amount = f"after {partial.size:,}" + (" bytes" if total is None else f" of {total:,} bytes")
        raise _Passing(f"the connection failed {amount}: {_plain(error)}") from error
    if total is not None and have < total:
        raise _Passing(f"received only {have:,} of {total:,} bytes")
    if total is not None and have > total:  # such as the whole file, called a part
        raise _Passing(f"received {have:,} bytes, but the server has {total:,}", lost=partial.discard())


def _answer(url: str, headers: dict[str, str], patience: Patience) -> Any:
    """Return the server's answer, whose body is still to come.

    Raises:
        DownloadFailed: an address is none, also one that the server or the environment gives.
    """
    requests = from_extra("requests", "for downloads")
    wrong, which = requests.exceptions, "is not the address of a file"
    try:
        return requests.get(url, headers=headers, stream=True, timeout=patience.timeout)
    except wrong.InvalidProxyURL as error:
        found = f"{url}: the proxy of the environment has no valid address: {error}"
    except (wrong.InvalidURL, wrong.InvalidSchema, wrong.MissingSchema) as error:
        found = f"{url} {which}: it must begin with http:// or https://"
        if re.match("https?://", url, re.IGNORECASE):
            found = f"{url} {which}, leads to what is none, or the environment's proxy is none: {error}"
    except wrong.RequestException:
        raise
    except ValueError as error:  # of a redirection; UnicodeDecodeError is one
        found = f"{url} leads to what {which}: {error}"
    raise DownloadFailed(found)


def _accepted(file: RemoteFile, partial: _Partial, response: Any) -> tuple[int | None, bool]:
    """Return the file's length, if the answer says so, and whether it continues what is there."""
    status, have = response.status_code, partial.size
    encoding = response.headers.get("Content-Encoding", "").lower()
    if status in (200, 206) and encoding in _CODINGS and Path(file.name).suffix in _PLAIN:
        problem = f"the server sends it compressed ({encoding}), though it is asked not to"
        raise DownloadFailed(f"{file.url}: {problem}")
    if status in (206, 416):
        span = re.fullmatch(rf"bytes (?:({_LENGTH})-\d+|\*)/({_LENGTH})", response.headers.get("Content-Range", ""))
        old, new = partial.version(file.url), _version_of(response.headers)
        changed = bool(old and new and old != new)
        total = int(span[2]) if span else None
        if span and not changed and (int(span[1]) == have if span[1] else have and total == have):
            return total, True
        problem = "it changed on the server" if changed else "the server did not resume where it was asked to"
        raise _Passing(problem, lost=partial.discard())
    if status == 200:
        is_chunked = response.headers.get("Transfer-Encoding", "").lower() == "chunked"  # which overrides a length
        length = None if is_chunked else re.fullmatch(_LENGTH, response.headers.get("Content-Length", ""))
        return (int(length[0]) if length else None), False
    problem = f"the server answers {status} {response.reason}".rstrip()
    if status in _TRY_AGAIN:
        raise _Passing(problem, _seconds(response.headers.get("Retry-After", "")))
    raise (NotThere if status in (404, 410) else DownloadFailed)(f"{file.url}: {problem}")


def _version_of(headers: Any) -> str:
    """Return a validator for ``If-Range``: a strong ETag or, without one, a date."""
    tag = headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", "")


def _seconds(retry_after: str) -> float:
    if retry_after.isdecimal():
        return float(retry_after)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def difference(file: RemoteFile, path: Path) -> str | None:
    """Return how a downloaded file differs from what its list says; None if it does not."""
    size = path.stat().st_size
    if file.num_bytes is not None and size != file.num_bytes:
        return f"it has {size:,} bytes, but its list says {file.num_bytes:,}"
    if file.digest:
        algorithm, expected = file.digest
        with open(path, "rb") as content:
            found = hashlib.file_digest(content, algorithm).hexdigest()
        if found != expected.lower():
            return f"its {algorithm} is {found}, expected {expected}"
    return None


def _plain(error: BaseException) -> str:
    """Describe an error of the network in a few words: by the innermost error that has a message."""
    seen = [error]
    while (inner := getattr(seen[-1], "reason", None) or seen[-1].__cause__ or seen[-1].__context__) is not None:
        if not isinstance(inner, BaseException) or inner in seen:
            break
        seen.append(inner)
    text = next((" ".join(str(one).split()) for one in reversed(seen) if str(one)), type(error).__name__)
    return text[:200]


def from_json(row: dict[str, Any]) -> RemoteFile:
    """Return the :class:`RemoteFile` whose fields were stored.

    Raises:
        UserError: its name is not that of a file in a folder.
    """
    digest = tuple(row["digest"]) if row["digest"] else None
    return RemoteFile(row["url"], plain_name(row["name"], row["url"]), row["num_bytes"], digest)


GIVE_UP_AFTER = 12  # consecutive failed files, after which the network is assumed to be down


def download_all(
    files: Sequence[RemoteFile], folder: Path, connections: int, patience: Patience, quiet: bool = False
) -> list[str]:
    """Download what is not in ``folder`` yet, ``connections`` files at a time.

    Returns:
        A sentence for each file that could not be downloaded, in the order of ``files``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    todo = [file for file in files if not (folder / file.name).is_file()]
    if not todo:
        return []
    sizes = [file.num_bytes for file in todo]
    total = None if None in sizes else sum(sizes)
    there = sum(bytes_there(folder / file.name) for file in todo)
    label = f"download ({len(todo)} files" + (f", {len(files) - len(todo)} there)" if len(todo) < len(files) else ")")
    with bytes_bar(total, label, quiet, there) as bar:
        return _in_threads(todo, folder, connections, patience, bar)


def bytes_there(path: Path) -> int:
    """Return how many bytes of a download are on disk."""
    places = (path, path.with_name(path.name + ".partial"))
    return sum(place.stat().st_size for place in places if place.is_file())


def _in_threads(todo: list[RemoteFile], folder: Path, connections: int, patience: Patience, bar: Any) -> list[str]:
    stop, lock = threading.Event(), threading.Lock()
    failures: dict[str, str] = {}
    waiting, running = list(todo), {}
    in_a_row = 0

    def advance(num_bytes: int) -> None:
        with lock:
            bar.update(num_bytes)

    with ThreadPoolExecutor(connections) as pool:
        try:
            while running or (waiting and in_a_row < GIVE_UP_AFTER):
                while waiting and in_a_row < GIVE_UP_AFTER and len(running) < connections:
                    file = waiting.pop(0)
                    future: Future = pool.submit(download, file, folder / file.name, patience, advance, stop)
                    running[future] = file
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    file = running.pop(future)
                    try:
                        future.result()
                        in_a_row = 0
                    except DownloadFailed as error:
                        failures[file.name] = str(error)
                        in_a_row += 1
        except BaseException:
            stop.set()
            raise
    rows = [failures[file.name] for file in todo if file.name in failures]
    if waiting:
        rows.append(f"{len(waiting)} further files were not tried, after {in_a_row} failures in a row")
    return rows
