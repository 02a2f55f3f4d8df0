"""Lines of text files just as ``fairseq-preprocess`` reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from data_prep.flow.parts import Part
from data_prep.flow.streams import DamagedFile, open_stream
from smlp.errors import UserError

BLOCK_BYTES = 1 << 20


def line_blocks(part: Part, max_bytes: int) -> Iterator[list[str]]:
    """The lines of a part, without their ends, in lists of about ``BLOCK_BYTES`` of text.

    A line belongs to the part that it begins in. A carriage return, alone or before a line feed, ends a line, as in
    Python's text files; there is no line after the last line end.

    Args:
        part: what to read.
        max_bytes: between two line feeds: memory is bounded by some multiples of it.

    Raises:
        UserError: the file is damaged or is not UTF-8, or a line is longer.
    """
    with open_stream(part.path) as stream:
        try:
            start = _next_line(stream, part.start)
            stop = None if part.stop is None else _next_line(stream, part.stop)
            if start or stop is not None:
                stream.seek(start)
            while stop is None or start < stop:
                content = stream.read(BLOCK_BYTES if stop is None else min(BLOCK_BYTES, stop - start))
                if content and not content.endswith(b"\n"):
                    content += stream.readline(max_bytes + 1)
                if not content:
                    return
                if len(content) > max_bytes:
                    _check_lengths(content, part, start, max_bytes)
                yield _lines_of(content, part, start)
                start += len(content)
        except DamagedFile as error:
            raise UserError(f"{error}: it is damaged, and only whole files are read as lines") from None


def _check_lengths(content: bytes, part: Part, start: int, max_bytes: int) -> None:
    for line in content.split(b"\n"):
        if len(line) > max_bytes:
            raise UserError(
                f"{part.path}: the line at byte {start:,} is longer than {max_bytes:,} bytes: give a larger "
                "--max-document-bytes, or leave the file out"
            )
        start += len(line) + 1


def _next_line(stream: BinaryIO, offset: int) -> int:
    """Where the first line begins that does not begin before ``offset``."""
    if not offset:
        return 0
    stream.seek(offset - 1)
    place = offset - 1
    while True:
        rest = stream.readline(BLOCK_BYTES)
        place += len(rest)
        if not rest or rest.endswith(b"\n"):
            return place


def _lines_of(content: bytes, part: Part, start: int) -> list[str]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{part.path} is not UTF-8: byte 0x{content[error.start]:02x} at position {start + error.start:,}"
        ) from None
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.removesuffix("\n").split("\n")
