"""fairseq's ``dict.txt`` of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from smlp.errors import UserError
from smlp.text.tokenizer_files import SPECIAL_SYMBOLS

PADDING = "madeupword{:04d}"  # fairseq's own name for symbols that only fill a dictionary


def padding_of(num_symbols: int, pad_to: int | None, pad_multiple: int) -> list[str]:
    """The symbols that fill a dictionary up.

    Args:
        num_symbols: of it, with fairseq's four special ones.
        pad_to: size to fill it to, or None.
        pad_multiple: otherwise, a number that its size is to be a multiple of.

    Raises:
        UserError: it is larger than ``pad_to``.
    """
    size = -(-num_symbols // pad_multiple) * pad_multiple if pad_to is None else pad_to
    if size < num_symbols:
        special = len(SPECIAL_SYMBOLS)
        raise UserError(
            f"--pad-to {size} is less than the {num_symbols} symbols that there are: {num_symbols - special} pieces "
            f"and {special} special ones"
        )
    return [PADDING.format(number) for number in range(size - num_symbols)]


def dictionary_bytes(symbols: Sequence[str], frequencies: Sequence[int]) -> bytes:
    """The content of ``dict.txt``: a symbol and how often it comes a line, without the special ones."""
    return "".join(f"{symbol} {count}\n" for symbol, count in zip(symbols, frequencies, strict=True)).encode()
