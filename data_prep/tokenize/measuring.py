"""Measure a tokenizer on a text: tokens, unknown ones, and the text that comes back when they are decoded."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from data_prep.tokenize.models import MAX_LINE_BYTES
from smlp.errors import UserError
from smlp.text.tokenizer import Tokenizer
from smlp.text.tokenizer_kinds import batches_of_text

BLOCK_CHARACTERS = 1 << 20  # of lines that are encoded at a time
ROUND_TRIP_CHARACTERS = 4 << 20  # of the sample that are decoded again
_EXAMPLES, _SHOWN = 5, 60  # changed lines shown, and their characters
# what text on the web holds and encodings lose: controls, spaces of all kinds, marks, joined emoji, noncharacters
ODD_LINES = (
    "".join(chr(code) for code in range(1, 0x250) if chr(code) != "\n"),
    "  two spaces before, a tab\t, three after   ",
    "a\u00a0b\u2003c\u3000d\u2028e\u2029f\u0085g\rh",
    "e\u0301 \u00e9 \ufb01 \uff21 \u212b \u1e9b\u0323",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f4\U000e0067\U000e0062\U000e007f",
    "\u0000\ufffd\ufdd0\uffff\ue000\U0010ffff\ufeff\u202e",
    "\u4e2d\u6587 \u0627\u0644\u0639 \u05e9\u05dc \u0939\u093f\u0928 \u0e44\u0e17\u0e22 \ud55c\uad6d",
    "'s 't're'VE 12345 x=y<|endoftext|></s><unk>",
)


def count_pieces(lines: Iterable[str], tokenizer: Tokenizer) -> tuple[np.ndarray, dict[str, Any]]:
    """Count each symbol of the dictionary, (V,) int64, and lines, words, bytes, tokens, unknown ones and their shares.

    Bytes are of the text without line ends, and tokens are without ``</s>``; also counted are the lines that
    SentencePiece does not learn from.
    """
    vocabulary = tokenizer.vocabulary
    frequency_V, totals = np.zeros(len(vocabulary), np.int64), Counter()
    for block in batches_of_text(lines, BLOCK_CHARACTERS):
        ids_N, _ = tokenizer.encode_batch(block)
        frequency_V += np.bincount(ids_N, minlength=len(vocabulary))
        totals["lines"] += len(block)
        totals["words"] += sum(len(line.split()) for line in block)
        sizes = [len(line.encode()) for line in block]
        totals["bytes"] += sum(sizes)
        totals["too_long_for_sentencepiece"] += sum(size > MAX_LINE_BYTES for size in sizes)
        totals["tokens"] += len(ids_N)
    totals["unknown"] = int(frequency_V[vocabulary.unk])
    tokens = max(totals["tokens"], 1)
    return frequency_V, {
        **totals,
        "unknown_share": totals["unknown"] / tokens,
        "tokens_per_word": totals["tokens"] / max(totals["words"], 1),
        "bytes_per_token": totals["bytes"] / tokens,
    }


def round_trip(lines: Iterable[str], tokenizer: Tokenizer) -> dict[str, Any]:
    """Count the lines that come back as they were when they are encoded and decoded, and the others by reason.

    Only the first ``ROUND_TRIP_CHARACTERS`` are read.
    """
    found, examples, size = Counter(lines=0, same=0, unknown=0, changed=0), [], 0
    for line in lines:
        size += len(line)
        ids = tokenizer.encode(line)
        back = tokenizer.decode(ids)
        found["lines"] += 1
        kind = "same" if back == line else "unknown" if tokenizer.vocabulary.unk in ids else "changed"
        found[kind] += 1
        if kind == "changed" and len(examples) < _EXAMPLES:
            examples.append(_difference(line, back))
        if size >= ROUND_TRIP_CHARACTERS:
            break
    return {
        "lines": found["lines"],
        "same": found["same"],
        "with_unknown_pieces": found["unknown"],
        "changed_by_normalisation": found["changed"],
        "examples": examples,
    }


def check_lossless(tokenizer: Tokenizer) -> None:
    """Check that the ``ODD_LINES`` come back as they were.

    Raises:
        UserError: one does not.
    """
    for line in ODD_LINES:
        back = tokenizer.decode(tokenizer.encode(line))
        if back != line:
            changed = _difference(line, back)
            raise UserError(f"this byte-level BPE is not lossless: {changed['was']!r} becomes {changed['becomes']!r}")


def _difference(was: str, becomes: str) -> dict[str, str]:
    """Return both texts from shortly before the place where they differ."""
    pairs = enumerate(itertools.zip_longest(was, becomes))
    start = max(next(place for place, pair in pairs if pair[0] != pair[1]) - _SHOWN // 3, 0)
    return {"was": was[start : start + _SHOWN], "becomes": becomes[start : start + _SHOWN]}
