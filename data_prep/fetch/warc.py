"""Extract the running text of web pages in WARC files, without navigation and advertisements."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.flow.documents import Defect, Failure, Loss, Record
from data_prep.flow.limits import DEFAULT_SECONDS, DocumentFailed, Helper, helper
from data_prep.flow.streams import DamagedFile, open_stream

_GZIP = b"\x1f\x8b"
_EMPTY = 16  # bytes: less than any gzip has, and what a body in chunks may have without any
_HTML = ("text/html", "application/xhtml+xml")


def pages(
    path: Path, source: str, max_bytes: int, max_seconds: float = DEFAULT_SECONDS
) -> Iterator[Record | Loss | Defect]:
    """Yield the pages of a WARC file, in order, as trafilatura extracts them; other responses are losses.

    A document is a record of type ``response``; requests and the file's own metadata are none. One record at a time is
    in memory. A page of more than ``max_bytes``, unpacked, is a loss; so is one that takes more than
    ``max_seconds`` of CPU time, which a defect names.
    """
    from warcio.archiveiterator import ArchiveIterator

    extract = helper(f"{__name__}:text_of_page", max_seconds, ("trafilatura",))
    num_records, problem = 0, ""
    with open_stream(path) as stream:
        content = _UntilDamage(stream)
        records = ArchiveIterator(content, check_digests=False)
        while True:
            is_page = True  # for all that is known of a record that is cut off in its header
            try:
                record = next(records, None)
            except Exception as error:  # warcio's exceptions, and others that truncated headers cause in it
                problem = " ".join(str(error).split())[:200]
                break
            if record is None:
                break
            is_page = record.rec_type == "response"
            piece = _page(record, path, source, max_bytes, extract) if is_page else None
            while record.raw_stream.read(1 << 16):
                pass
            if getattr(record.raw_stream, "limit", 1) > 0:  # no limit: even its length is missing
                problem = "a record is cut off"
                break
            num_records += 1
            if piece is not None:
                yield piece
    if problem or content.damage:
        if is_page:
            yield Loss("cut off by damage")
        yield Defect("damaged: it breaks off", f"{path}: after {num_records:,} records: {content.damage or problem}")
    elif not num_records:
        yield Defect("no document in it", str(path))


def text_of_page(content: bytes, url: str) -> str | None:
    """Return the running text of a page, "" if there is none, None if it cannot be parsed; ``url`` may be empty."""
    import trafilatura

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # it reports every page without an article
    try:
        return trafilatura.extract(content, include_comments=False, include_tables=False, url=url or None) or ""
    except Exception:  # exceptions of its parsers on unusual pages; the rest of the file is still read
        return None


class _UntilDamage:
    """A stream that ends where its file is damaged, so that warcio returns everything before."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.damage = stream, ""

    def read(self, num_bytes: int = -1) -> bytes:
        try:
            return self._stream.read1(num_bytes)
        except DamagedFile as error:
            self.damage = str(error)
            return b""

    def tell(self) -> int:
        return 0  # positions in the file are not needed here

    def close(self) -> None:
        self._stream.close()


def _breaks_off(stream: Any, content: bytes) -> bool:
    """Return whether gzip or deflate ends too early or is damaged; what warcio cannot unpack at all stays as it was."""
    if getattr(stream, "decompressor", None) is None:
        return getattr(stream, "decomp_type", None) == "gzip" and content.startswith(_GZIP)
    return not getattr(stream.decompressor, "eof", True)  # brotli's do not say


def _page(record: Any, path: Path, source: str, max_bytes: int, extract: Helper) -> Record | Loss:
    headers, http = record.rec_headers, record.http_headers
    url = headers.get_header("WARC-Target-URI") or ""
    if http is None or http.get_statuscode() != "200":
        return Loss("no page: the server's answer was not 200")
    if (http.get_header("Content-Type") or "").partition(";")[0].strip().lower() not in _HTML:
        return Loss("not HTML")
    try:
        stream = record.content_stream()
    except AttributeError:  # warcio sets one of Google's class, which has no room for it
        return Failure("page in brotli, which warcio unpacks with brotlipy alone", where=f"{path}: {url}")
    is_sent = getattr(record.raw_stream, "limit", _EMPTY + 1) > _EMPTY
    stream.read_all_members = True  # gzip may have several; a stream that unpacks nothing ignores it
    with redirect_stderr(io.StringIO()):  # where warcio says that a body is damaged, and not in which page
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        return Loss(f"longer than {max_bytes:,} bytes")
    if is_sent and _breaks_off(stream, content):
        return Failure("page whose compressed text is damaged", where=f"{path}: {url}")
    try:
        text = extract(content, url)
    except DocumentFailed as error:
        return Failure(str(error), where=f"{path}: {url}")
    if text is None:
        return Loss("page that cannot be parsed")
    if not text:
        return Loss("no text found on the page")
    identity = (headers.get_header("WARC-Record-ID") or url).strip("<>")
    return Record(text, identity, source, {"url": url, "date": headers.get_header("WARC-Date") or ""})
