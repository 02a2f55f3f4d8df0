"""Missing, empty and unreadable text files, dictionaries and binarised data: one sentence that says what to do."""

from __future__ import annotations

import codecs
import functools
import struct
from pathlib import Path
from typing import Any

import numpy as np

from smlp.errors import UserError
from smlp.evaluation.binarized import HEADER, MAGIC, TOKEN_TYPES

_FIRST_LENGTH = len(MAGIC) + HEADER.size
_LENGTH = struct.Struct("<i")  # then, for each line, its number of tokens
_POSITION = struct.Struct("<q")  # and after all lengths, where each line starts in the .bin file, in bytes


def apply() -> None:
    from fairseq import utils
    from fairseq.binarizer import FileBinarizer
    from fairseq.data import Dictionary
    from fairseq.tasks.language_modeling import LanguageModelingTask

    setup_dictionary = LanguageModelingTask.setup_dictionary.__func__
    load_dataset = LanguageModelingTask.load_dataset
    add_file = Dictionary.add_file_to_dictionary
    binarize = FileBinarizer.multiprocess_dataset.__func__

    @functools.wraps(setup_dictionary)
    def checked_setup_dictionary(cls: type, args: Any, **kw: Any) -> Any:
        if args.data:
            check_dictionary(utils.split_paths(args.data)[0])
        return setup_dictionary(cls, args, **kw)

    @functools.wraps(load_dataset)
    def checked_load_dataset(self: Any, split: str, epoch: int = 1, combine: bool = False, **kw: Any) -> Any:
        shards = utils.split_paths(self.args.data)
        if self.args.dataset_impl not in ("raw", "fasta"):  # those two have no index
            check_split(shards[(epoch - 1) % len(shards)], split)
        return load_dataset(self, split, epoch=epoch, combine=combine, **kw)

    @functools.wraps(add_file)
    def checked_add_file(filename: str, *rest: Any, **kw: Any) -> None:
        check_text(filename)
        add_file(filename, *rest, **kw)

    @functools.wraps(binarize)
    def checked_binarize(cls: type, input_file: str, *rest: Any, **kw: Any) -> Any:
        check_text(input_file)
        return binarize(cls, input_file, *rest, **kw)

    LanguageModelingTask.setup_dictionary = classmethod(checked_setup_dictionary)
    LanguageModelingTask.load_dataset = checked_load_dataset
    Dictionary.add_file_to_dictionary = staticmethod(checked_add_file)
    FileBinarizer.multiprocess_dataset = classmethod(checked_binarize)


def how_to_make(directory: str | Path) -> str:
    """The command that makes a data directory, as the end of a sentence."""
    return (
        "make it with fairseq-preprocess --only-source --trainpref TRAIN.txt --validpref VALID.txt "
        f"--testpref TEST.txt --destdir {directory}"
    )


def check_dictionary(directory: str | Path) -> None:
    """Raise ``UserError`` if a data directory is missing or its ``dict.txt`` is missing, empty or malformed."""
    path = Path(directory) / "dict.txt"
    if not path.parent.is_dir():
        raise UserError(f"there is no data directory {directory}; {how_to_make(directory)}")
    if not path.is_file():
        raise UserError(f"the data directory {directory} has no dict.txt; {how_to_make(directory)}")
    check_text(path)
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            # "SYMBOL COUNT", with one flag that fairseq knows
            fields = line.rstrip().removesuffix(" #fairseq:overwrite").rsplit(" ", 1)
            if len(fields) != 2 or not fields[1].isdigit():
                raise UserError(f"{path}, line {number}: expected 'SYMBOL COUNT', found {line.rstrip()[:40]!r}")


def check_split(directory: str | Path, split: str) -> int | None:
    """Check one split of a binarised data set.

    Args:
        directory: the data directory.
        split: ``train``, ``valid``, ...; the files are ``SPLIT.idx`` and ``SPLIT.bin``.

    Returns:
        The number of tokens, or None for a format other than fairseq's default one (mmap).

    Raises:
        UserError: a file is missing or truncated, or there is not a single token.
    """
    index, data = Path(directory) / f"{split}.idx", Path(directory) / f"{split}.bin"
    for path in (index, data):
        if not path.is_file():
            present = sorted(file.stem for file in Path(directory).glob("*.idx"))
            splits = f"it holds the splits {', '.join(present)}" if present else "it holds no split at all"
            raise UserError(
                f"the data directory {directory} has no {path.name} (each split needs a .bin and an .idx file; "
                f"{splits}); {how_to_make(directory)}"
            )
    tokens_and_bytes = _read_index(index, how_to_make(directory))
    if tokens_and_bytes is None:
        return None
    tokens, num_bytes = tokens_and_bytes
    if tokens == 0:
        raise UserError(f"{data} holds no tokens: the text of split {split!r} was empty; {how_to_make(directory)}")
    if data.stat().st_size < num_bytes:
        raise UserError(
            f"{data} is truncated: {data.stat().st_size:,} bytes where its index promises {num_bytes:,}; "
            + how_to_make(directory)
        )
    return tokens


def _read_index(index: Path, remedy: str) -> tuple[int, int] | None:
    """Tokens and bytes that an mmap index file promises; None if it is in another of fairseq's formats.

    Raises:
        UserError: it is no index file, or it is truncated.
    """
    size = index.stat().st_size
    with index.open("rb") as file:
        start = file.read(_FIRST_LENGTH)
        if start.startswith(b"TNTIDX"):  # the formats before mmap: lazy and cached
            return None
        if not start.startswith(MAGIC) or len(start) < _FIRST_LENGTH:
            raise UserError(f"{index} ({size:,} bytes) is not a complete index file; {remedy}")
        _, code, num_lines = HEADER.unpack_from(start, len(MAGIC))
        needed = _FIRST_LENGTH + num_lines * (_LENGTH.size + _POSITION.size)
        if size < needed or code not in TOKEN_TYPES:
            raise UserError(f"{index} is damaged: {size:,} bytes where {num_lines:,} lines need {needed:,}; {remedy}")
        if num_lines == 0:
            return 0, 0
        file.seek(_FIRST_LENGTH + (num_lines - 1) * _LENGTH.size)
        (last_length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        file.seek(needed - _POSITION.size)
        (last_position,) = _POSITION.unpack(file.read(_POSITION.size))
    item_bytes = np.dtype(TOKEN_TYPES[code]).itemsize
    num_bytes = last_position + last_length * item_bytes
    return num_bytes // item_bytes, num_bytes


def check_text(path: str | Path) -> None:
    """Raise ``UserError`` if a text file is missing, empty or not UTF-8 (naming the line and byte)."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no text file {path}")
    if path.stat().st_size == 0:
        raise UserError(f"the text file {path} is empty (0 bytes)")
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, lines = 0, 1
    with path.open("rb") as file:
        while True:
            chunk = file.read(1 << 20)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                bad = error.object[error.start]
                position = offset - pending + error.start
                line = lines + error.object[: error.start].count(b"\n")
                raise UserError(
                    f"{path} is not UTF-8 text: byte 0x{bad:02x} at position {position:,} (line {line:,})"
                ) from error
            if not chunk:
                return
            offset += len(chunk)
            lines += chunk.count(b"\n")
