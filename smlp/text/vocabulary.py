"""Symbols and their ids.

A fairseq dictionary file has one ``symbol count`` pair a line; the four special symbols come before its first line.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from smlp.errors import UserError
from smlp.files import read_text
from smlp.text.tokenizer_files import SPECIAL_SYMBOLS


class Vocabulary:
    """Symbols and their ids, as in fairseq's ``dict.txt``."""

    bos, pad, eos, unk = range(4)

    def __init__(self, symbols: Iterable[str]) -> None:
        self.symbols = [*SPECIAL_SYMBOLS, *symbols]
        self.index = {symbol: position for position, symbol in enumerate(self.symbols)}

    def __len__(self) -> int:
        return len(self.symbols)

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Reads a ``dict.txt``.

        Raises:
            UserError: the file is missing, cannot be read, is not UTF-8, or a line is not a symbol and a count.
        """
        try:
            # not splitlines(): a symbol may be one of Unicode's other line ends
            lines = read_text(path).removesuffix("\n").split("\n")
        except FileNotFoundError:
            raise UserError(f"there is no dictionary file {path}") from None
        except OSError as error:
            raise UserError(f"dictionary {path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"dictionary {path} is not UTF-8 at byte {error.start}") from None
        symbols = []
        for number, line in enumerate(lines, start=1):
            fields = line.removesuffix(" #fairseq:overwrite").rsplit(" ", 1)
            if len(fields) != 2 or not fields[1].isdigit():
                raise UserError(f"dictionary {path}, line {number}: expected 'symbol count', got {line!r}")
            symbols.append(fields[0])
        return cls(symbols)
