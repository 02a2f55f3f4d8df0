"""Texts as words and as hashes of runs of words. The same in every process, unlike Python's own ``hash``."""

from __future__ import annotations

import re
from hashlib import blake2b

import numpy as np

from data_prep.nfc import nfc

FACTOR = np.uint64(0x5851F42D4C957F2D)
_MAX_CACHED_WORDS = 1 << 18  # about 40 MB
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
_TABLE = bytes(ord(chr(code).lower()) if code > 127 or chr(code).isalnum() else 32 for code in range(128)) + bytes(
    range(128, 256)
)


def words_of(text: str) -> list[bytes]:
    """Runs of letters and digits in lower case, in UTF-8; whatever else there is only separates them."""
    text = text.lower()
    if not text.isascii():
        text = _NOT_ASCII.sub(_letters_and_digits, nfc(text))
    return text.encode().translate(_TABLE).split()


def _letters_and_digits(match: re.Match[str]) -> str:
    return "".join([character if character.isalnum() else " " for character in match[0]])


class _Hashes(dict):
    def __missing__(self, word: bytes) -> int:
        if len(self) >= _MAX_CACHED_WORDS:
            self.clear()
        value = int.from_bytes(blake2b(word, digest_size=8).digest(), "little")
        self[word] = value
        return value


_hashes = _Hashes()


def word_hashes(words: list[bytes]) -> np.ndarray:
    """A 64-bit hash of each word: uint64, shape (words,)."""
    return np.fromiter(map(_hashes.__getitem__, words), dtype=np.uint64, count=len(words))


def ngram_hashes(hashes: np.ndarray, n: int) -> np.ndarray:
    """A 64-bit hash of each run of ``n`` words: uint64, shape (words - n + 1,), empty if there are fewer words.

    Args:
        hashes: of the words, as :func:`word_hashes` gives them.
        n: words of a run.
    """
    number = len(hashes) - n + 1
    if number < 1:
        return hashes[:0]
    keys = hashes[:number].copy()
    for offset in range(1, n):
        keys *= FACTOR
        keys += hashes[offset : offset + number]
    return keys


def text_hash(text: str, words: list[bytes]) -> tuple[int, int]:
    """128 bits, equal for texts of the same words in the same order; of the text itself where it has no word."""
    content = b" ".join(words) if words else text.encode("utf-8", "surrogatepass")
    digest = blake2b(content, digest_size=16, person=b"words" if words else b"text").digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
