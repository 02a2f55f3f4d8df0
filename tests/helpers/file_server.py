"""A web server in a thread, for the tests: small files, and what can go wrong with them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer:
    """Files by path, and what was asked for.

    Attributes:
        files: path -> content.
        tags: path -> ETag; that of the content where there is none, no tag at all for "".
        faults: path -> function(handler, content) -> True if it has answered; called for each request.
        ranges: whether ``Range`` is honoured.
        requests: pairs of path and Range header ("" if none), in the order in which they came.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.tags: dict[str, str] = {}
        self.faults: dict[str, Callable[[Handler, bytes], bool]] = {}
        self.ranges = True
        self.requests: list[tuple[str, str]] = []
        self.address = ""

    def url(self, path: str) -> str:
        return f"{self.address}/{path}"

    def asked(self, path: str) -> list[str]:
        """Range headers of the requests for a path."""
        return [header for name, header in self.requests if name == path]


class Handler(BaseHTTPRequestHandler):
    """Answers from ``server.state``, with ETag, Range and If-Range."""

    protocol_version = "HTTP/1.1"
    timeout = 20

    def do_GET(self) -> None:
        state: FileServer = self.server.state
        path = self.path.lstrip("/")
        state.requests.append((path, self.headers.get("Range", "")))
        content = state.files.get(path)
        if content is None:
            self.answer(404, b"")
            return
        fault = state.faults.get(path)
        if fault and fault(self, content):
            return
        tag = self.tag(content)
        wanted = self.headers.get("Range", "") if state.ranges else ""
        if wanted and self.headers.get("If-Range", tag) == tag:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
            span = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.answer(206, content[start:], {"Content-Range": span, "ETag": tag})
            return
        self.answer(200, content, {"ETag": tag})

    def tag(self, content: bytes) -> str:
        default = f'"{hashlib.md5(content).hexdigest()}"'
        return self.server.state.tags.get(self.path.lstrip("/"), default)

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None, length: int | None = None):
        """Sends ``content``; ``length`` is what the header says, if that is not its length."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)
        if length is not None and length > len(content):
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


def first(times: int, fault: Callable[[Handler, bytes], bool]) -> Callable[[Handler, bytes], bool]:
    """A fault of the first requests only."""
    left = [times]

    def do(handler: Handler, content: bytes) -> bool:
        left[0] -= 1
        return left[0] >= 0 and fault(handler, content)

    return do


def cut_after(num_bytes: int) -> Callable[[Handler, bytes], bool]:
    """Says the whole length, sends ``num_bytes`` and hangs up."""

    def do(handler: Handler, content: bytes) -> bool:
        handler.answer(200, content[:num_bytes], {"ETag": handler.tag(content)}, len(content))
        return True

    return do


def status(code: int, **headers: str) -> Callable[[Handler, bytes], bool]:
    """An error."""

    def do(handler: Handler, content: bytes) -> bool:
        handler.answer(code, b"", {name.replace("_", "-"): value for name, value in headers.items()})
        return True

    return do


def stall(num_bytes: int, seconds: float) -> Callable[[Handler, bytes], bool]:
    """Sends ``num_bytes`` and then nothing for a while."""

    def do(handler: Handler, content: bytes) -> bool:
        handler.answer(200, content[:num_bytes], {"ETag": handler.tag(content)}, len(content))
        handler.wfile.flush()
        time.sleep(seconds)
        return True

    return do


@contextmanager
def serving() -> Iterator[FileServer]:
    """A server on a port of its own, until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.state = state = FileServer()
    state.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
