"""Read plain and compressed files as streams of bytes, and write them whole or not at all."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import importlib
import io
import json
import lzma
import math
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, BinaryIO

from smlp.errors import UserError
from smlp.files import NamedFile, read_text, renamed_when_whole, temporary_name

COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
PARTIAL = ".partial"
READ_BYTES = 1 << 20
_STREAM_BYTES = 1 << 13  # compressed bytes at a time; what follows a stream in them is copied
_ZSTD_BYTES = 1 << 10  # compressed bytes at a time; zeros can expand them to 32 MiB
_LEAST_UNPACKED, _MOST_RATIO = 1 << 26, 100  # bytes of content that is read whole, and per byte of its file
_GZIP_LEVEL = 4  # three times as fast as level 6; English text becomes 7 % larger
_DAMAGE = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)  # of a damaged or truncated file
_DECOMPRESSORS = {".xz": lzma.LZMADecompressor, ".bz2": bz2.BZ2Decompressor}

#: called with the path of each file before :func:`write_stream` writes it
noting: ContextVar[Callable[[Path], None] | None] = ContextVar("noting", default=None)


class DamagedFile(Exception):
    """A compressed file ends too early, or is not what its name says. What came before has been handed out."""


def suffix_of(path: Path) -> str:
    """Return the suffix before a compression's: ``.jsonl`` of ``a.jsonl.gz``."""
    return (Path(path.stem).suffix if compression_of(path) else path.suffix).lower()


def compression_of(path: Path) -> str:
    """Return the suffix of a compression, in lower case; "" for a plain file."""
    return path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""


def name_of(path: Path) -> str:
    """Return the name without suffixes of formats: ``a.b`` of ``a.b.jsonl.gz``."""
    return Path(path.stem).stem if compression_of(path) else path.stem


class _Checked(io.RawIOBase):
    """A decompressing stream whose errors are all :class:`DamagedFile`, with the file's name."""

    def __init__(self, stream: Any, path: Path) -> None:
        self._stream, self._path = stream, path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._stream.read1(len(buffer))  # return the available bytes before raising an error
        except _DAMAGE as error:
            raise DamagedFile(f"{self._path}: {error or type(error).__name__}") from error
        except OSError as error:
            if error.errno is not None:  # an error of the disk, not of the format
                error.filename = str(self._path)
                raise
            raise DamagedFile(f"{self._path}: {error}") from error
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._stream.close()
        super().close()


def open_stream(path: Path) -> BinaryIO:
    """Open a file for buffered reading, decompressed as its suffix says (``.gz``, ``.zst``, ``.xz``, ``.bz2``).

    Reading raises :class:`DamagedFile` where a compressed file breaks off or is not one.

    Raises:
        UserError: there is no such file, or what decompresses it is not installed.
    """
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    compression = compression_of(path)
    if compression == ".gz":
        raw = gzip.GzipFile(path)
    elif compression == ".zst":
        raw = _ZstdFrames(path)
    elif compression:
        raw = _Streams(path, _DECOMPRESSORS[compression])
    else:
        return _buffered(path)
    return io.BufferedReader(_Checked(raw, path), READ_BYTES)


def read_unpacked(path: Path) -> bytes:
    """Return the whole content of a file, decompressed.

    Raises:
        DamagedFile: it breaks off, is not what its name says, or unpacks to far more than text does.
        UserError: as :func:`open_stream`.
    """
    most = max(_LEAST_UNPACKED, _MOST_RATIO * path.stat().st_size) if compression_of(path) else math.inf
    pieces, size = [], 0
    with open_stream(path) as stream:
        while piece := stream.read(READ_BYTES):
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise DamagedFile(f"{path}: {path.stat().st_size:,} bytes unpack to more than {most:,}")
    return b"".join(pieces)


def _buffered(path: Path) -> io.BufferedReader:
    return io.BufferedReader(NamedFile(path), READ_BYTES)


class _Streams:
    """Read all streams of a .xz or .bz2 file. Python's own readers take what begins no stream for the file's end."""

    def __init__(self, path: Path, decompressor: Callable[[], Any]) -> None:
        self._file, self._decompressor, self._stream = _buffered(path), decompressor, decompressor()

    def read1(self, num_bytes: int) -> bytes:
        content = b""
        while not content:
            if self._stream.eof:
                following = self._stream.unused_data.lstrip(b"\0")  # padding
                while not following:
                    if not (read := self._file.read(_STREAM_BYTES)):
                        return b""
                    following = read.lstrip(b"\0")
                self._stream = self._decompressor()
            else:
                following = self._file.read(_STREAM_BYTES) if self._stream.needs_input else b""
                if self._stream.needs_input and not following:
                    raise EOFError("compressed file ended before the end of a stream")
            content = self._stream.decompress(following, num_bytes)
        return content

    def close(self) -> None:
        self._file.close()


class _ZstdFrames:
    """Read all frames of a .zst file. Unlike zstandard's own reader, it notices a file that is cut off."""

    def __init__(self, path: Path) -> None:
        self._zstandard, self._file = _zstandard(path), _buffered(path)
        self._frame, self._ready, self._input = None, memoryview(b""), b""

    def read1(self, num_bytes: int) -> bytes | memoryview:
        while not self._ready:
            compressed = self._input or self._file.read(_ZSTD_BYTES)
            self._input = b""
            if not compressed:
                if self._frame is not None:
                    raise EOFError("compressed file ended before the end of a frame")
                return b""
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(compressed))
            except self._zstandard.ZstdError as error:
                is_large = "too much memory" in str(error)
                problem = "its window is above 128 MiB: compress it again without zstd's --long"
                raise EOFError(problem if is_large else str(error)) from error
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        content, self._ready = self._ready[:num_bytes], self._ready[num_bytes:]
        return content

    def close(self) -> None:
        self._file.close()


def _zstandard(path: Path) -> Any:
    return from_extra("zstandard", f"{path}: for .zst files")


def from_extra(module: str, purpose: str) -> Any:
    """Import a module of the extra ``data``.

    Raises:
        UserError: it is not installed; ``purpose``, which begins the message, says what it is needed for.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{purpose} install the extra 'data': pip install -e '.[data]'") from None


class WrittenFile:
    """A file behind :func:`write_stream`. Once it is closed, its size on disk and its SHA-256 are known."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, content: bytes) -> int:
        self._digest.update(content)
        self.num_bytes += len(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()

    def row(self, out: Path, **facts: Any) -> dict[str, Any]:
        """Return the row among the outputs of a step whose folder is ``out``: name, bytes, SHA-256 and ``facts``."""
        digest = self._digest.hexdigest()
        return {"name": str(self.path.relative_to(out)), "bytes": self.num_bytes, "sha256": digest, **facts}


@contextmanager
def write_stream(path: Path) -> Any:
    """Open ``path`` for writing, compressed as its suffix says; give (stream, :class:`WrittenFile`).

    The file gets its name when the block ends without an error, on disk and with all its content. Until then it is
    ``NAME.MACHINE.PROCESS.partial``, which an error removes, and which a kill leaves until a command without
    ``--share`` runs in the folder. The same content gives the same bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if note := noting.get():
        note(path)
    with renamed_when_whole(temporary_name(path, PARTIAL), path) as file:
        written = WrittenFile(path, file)
        stream = _compressing(path, written)
        yield stream, written
        if stream is not written:
            stream.close()


def _compressing(path: Path, file: Any) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=_GZIP_LEVEL)
    if path.suffix == ".zst":
        return _zstandard(path).ZstdCompressor(level=3).stream_writer(file, closefd=False)
    if path.suffix == ".xz":
        return lzma.open(file, "wb")
    if path.suffix == ".bz2":
        return bz2.open(file, "wb")
    return file


def write_bytes(path: Path, content: bytes, out: Path | None = None) -> dict[str, Any]:
    """Write a small file, whole or not at all; return its name below ``out`` (default: its folder), bytes, SHA-256."""
    with write_stream(path) as (stream, written):
        stream.write(content)
    return written.row(path.parent if out is None else out)


def as_json(value: Any, **style: Any) -> bytes:
    """Return UTF-8 or, if a text or a file's name is not valid UTF-8, ASCII with escapes; ``style`` is of ``json``."""
    try:
        return json.dumps(value, ensure_ascii=False, **style).encode()
    except UnicodeEncodeError:
        return json.dumps(value, **style).encode()


def json_line(row: Any) -> bytes:
    """Return a line of ``.jsonl`` in UTF-8.

    A row with half of a surrogate pair, which UTF-8 lacks, has escapes. Numbers that JSON lacks, such as the infinity
    that Python reads from ``1e999``, become strings.
    """
    try:
        return as_json(row, allow_nan=False) + b"\n"
    except ValueError:
        row = json.loads(json.dumps(row), parse_constant=lambda number: str(float(number)))
        return as_json(row) + b"\n"


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a small file of a JSON object; return None if it is not there or damaged."""
    try:
        content = json.loads(read_text(path))
        return content if isinstance(content, dict) else None
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None


def sha256_of(path: Path, start: int = 0, stop: int | None = None) -> str:
    """Return the checksum of a file's bytes on disk, or of those from ``start`` to ``stop``."""
    with _buffered(path) as file:
        if not start and stop is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        file.seek(start)
        left = (path.stat().st_size if stop is None else stop) - start
        while left > 0 and (content := file.read(min(left, READ_BYTES))):
            digest.update(content)
            left -= len(content)
    return digest.hexdigest()
