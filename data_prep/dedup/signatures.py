"""Turn documents into words, hashes of runs of words, and MinHash signatures (Broder, 1997) by datasketch.

Hashes are the same in every process, unlike Python's own ``hash``. The Jaccard similarity of two documents is the
number of runs of words in both, divided by that of runs in either. The share of equal entries in their signatures
estimates it, with a standard error of sqrt(s (1 - s) / num_perm). Similar documents are likely to share bands of
entries.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from data_prep.clean.rules import nfc
from smlp.errors import UserError

WORDS = 2  # what words are; signatures of another kind are made anew
FACTOR = np.uint64(0x5851F42D4C957F2D)
_MAX_CACHED_WORDS = 1 << 18  # about 40 MB
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
_TABLE = bytes(ord(chr(code).lower()) if chr(code).isalnum() else 32 for code in range(128)) + bytes(range(128, 256))


def words_of(text: str) -> list[bytes]:
    """Return the runs of letters and digits with their marks, in lower case and UTF-8; all else only separates them.

    Marks are the vowel signs of Hindi or Thai, for example, without which other words would be the same.
    """
    text = text.lower()
    if not text.isascii():
        text = _NOT_ASCII.sub(_letters_and_digits, nfc(text))
    return text.encode().translate(_TABLE).split()


def _letters_and_digits(match: re.Match[str]) -> str:
    if match[0].isalnum():
        return match[0]
    before, kept = match.string[match.start() - 1 : match.start()], []
    is_word = before.isalnum()
    for character in match[0]:
        is_word = character.isalnum() or (is_word and unicodedata.category(character)[0] == "M")
        kept.append(character if is_word else " ")
    return "".join(kept)


class _Hashes(dict):
    def __missing__(self, word: bytes) -> int:
        if len(self) >= _MAX_CACHED_WORDS:
            self.clear()
        value = int.from_bytes(blake2b(word, digest_size=8).digest(), "little")
        self[word] = value
        return value


_hashes = _Hashes()


def word_hashes(words: list[bytes]) -> np.ndarray:
    """Return a 64-bit hash of each word: uint64, shape (words,)."""
    return np.fromiter(map(_hashes.__getitem__, words), dtype=np.uint64, count=len(words))


def ngram_hashes(hashes: np.ndarray, n: int) -> np.ndarray:
    """Return a 64-bit hash of each run of ``n`` words: uint64, shape (words - n + 1,), empty if there are fewer words.

    ``hashes`` are those of the words, as :func:`word_hashes` gives them.
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
    """Return 128 bits, equal for texts of the same words in the same order; a text without words is hashed as it is."""
    content = b" ".join(words) if words else text.encode("utf-8", "surrogatepass")
    digest = blake2b(content, digest_size=16, person=b"words" if words else b"text").digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


# Weights of false positives and of misses: false positives are compared again and only cost time.
WEIGHTS = (0.02, 0.98)
_MAX_LSH = 0.95  # above, datasketch would take a single band
_CHUNK = 1024  # runs of words hashed at once; the buffer is num_perm times as large


@dataclass(frozen=True)
class Scheme:
    """The settings by which near duplicates are found."""

    num_perm: int  # entries of a signature, uint32
    ngram: int  # words of a run
    seed: int  # of the hash functions
    bands: int  # of a signature
    rows: int  # entries of a band

    @classmethod
    def for_threshold(cls, threshold: float, num_perm: int, ngram: int, seed: int) -> Scheme:
        """Choose the bands that datasketch finds best for a similarity.

        Raises:
            UserError: datasketch is not installed.
        """
        lsh = _datasketch().MinHashLSH(threshold=min(threshold, _MAX_LSH), num_perm=num_perm, weights=WEIGHTS)
        return cls(num_perm, ngram, seed, lsh.b, lsh.r)


def _datasketch():
    try:
        import datasketch
    except ImportError:
        raise UserError("near duplicates: install the extra 'data' (pip install -e '.[data]'), or --no-near") from None
    return datasketch


def shingles(hashes: np.ndarray, ngram: int) -> np.ndarray:
    """Return hashes of a document's runs of words, uint32; one of the whole if it is shorter than a run."""
    return (ngram_hashes(hashes, max(min(ngram, len(hashes)), 1)) >> np.uint64(32)).astype(np.uint32)


def signatures(documents: Sequence[np.ndarray], scheme: Scheme) -> np.ndarray:
    """Return the signatures of documents: uint32, shape (documents, num_perm).

    ``documents`` are the hashes of the runs of words of each, as :func:`shingles` gives them.
    """
    sizes = [max(-(-len(hashes) // _CHUNK), 1) for hashes in documents]
    starts = np.concatenate(([0], np.cumsum(sizes[:-1]))).astype(np.int64)
    pieces = (
        hashes[start : start + _CHUNK].tolist()
        for hashes in documents
        for start in range(0, max(len(hashes), 1), _CHUNK)
    )
    hashed = _datasketch().MinHash.bulk(pieces, num_perm=scheme.num_perm, seed=scheme.seed, hashfunc=int)
    values = np.stack([piece.hashvalues for piece in hashed]).astype(np.uint32, copy=False)
    return np.minimum.reduceat(values, starts, axis=0)


def band_keys(values: np.ndarray, scheme: Scheme) -> np.ndarray:
    """Return a key for each band of each signature: uint64, shape (documents, bands)."""
    parts = values[:, : scheme.bands * scheme.rows].reshape(len(values), scheme.bands, scheme.rows).astype(np.uint64)
    keys = np.broadcast_to(np.arange(1, scheme.bands + 1, dtype=np.uint64), parts.shape[:2]).copy()
    for row in range(scheme.rows):
        keys = keys * FACTOR + parts[:, :, row]
        keys ^= keys >> np.uint64(29)
    return keys


def similarity(first: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Estimate the Jaccard similarity of a signature (num_perm,) with others (documents, num_perm): float64."""
    return (others == first).mean(axis=1)
