"""Documents of binary data as text again."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_prep.inspecting.token_file import BLOCK_LINES, TokenFile
from smlp.text.tokenizer import Tokenizer

SHOWN_TOKENS = 100  # of a document, at most


def samples_of(prefix: Path, tokenizer: Tokenizer, number: int) -> list[str]:
    """How ``number`` documents begin that lie at equal distances in a file.

    Args:
        prefix: of a file that is whole.
        tokenizer: of its dictionary.
        number: fewer are given where there are fewer documents.
    """
    file = TokenFile.open(prefix)
    total = len(file.lengths)
    starts = dict.fromkeys(_document_start(file, total * place // number) for place in range(number))
    texts = []
    for line in (line for line in starts if line is not None):
        first = int(file.pointers[line]) // file.tokens.dtype.itemsize
        lengths_L = file.lengths[line : line + SHOWN_TOKENS]
        ends = np.flatnonzero(lengths_L == 1)
        num_tokens = int(lengths_L[: ends[0] if ends.size else None].sum())
        shown = file.tokens[first : first + min(num_tokens, SHOWN_TOKENS)].tolist()
        texts.append(tokenizer.decode(shown).rstrip("\n") + (" ..." if num_tokens > SHOWN_TOKENS else ""))
    return texts


def _document_start(file: TokenFile, line: int) -> int | None:
    """The first line from ``line`` on that begins a document; looks at a block of lines only."""
    lengths_L = file.lengths[max(line - 1, 0) : line + BLOCK_LINES]
    is_end_L = lengths_L == 1
    begins_L = ~is_end_L & np.concatenate([[line == 0], is_end_L[:-1]])
    found = np.flatnonzero(begins_L)
    return max(line - 1, 0) + int(found[0]) if found.size else None
