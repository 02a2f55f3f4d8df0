"""Paragraphs that say again, exactly or nearly, what stood earlier in the corpus."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from data_prep.corpus import Document

SHINGLE_WORDS = 8
MAX_REPEATED_SHARE = 0.5  # of a paragraph's shingles that may stand earlier in the corpus

_NOT_WORD = re.compile(r"[\W_]+")


def near_duplicate_key(paragraph: str) -> str:
    """Equal for paragraphs that differ only in case, digits, punctuation or spacing."""
    return _NOT_WORD.sub(" ", re.sub(r"\d", "0", paragraph.lower())).strip() or paragraph


def deduplicated(documents: Iterable[Document], removed: Counter[str]) -> list[Document]:
    """The documents without repeated paragraphs: the first copy stays. Documents left empty are dropped.

    A near duplicate has the key of an earlier paragraph (:func:`near_duplicate_key`) or shares more than
    ``MAX_REPEATED_SHARE`` of its runs of ``SHINGLE_WORDS`` words with earlier ones. ``removed`` counts paragraphs.
    """
    texts: set[str] = set()
    keys: set[str] = set()
    word_ids: dict[str, int] = {}  # tuples of small integers hash faster, and alike in every process
    seen_shingles: set[tuple[int, ...]] = set()
    kept_documents = []
    for document in documents:
        kept = []
        for paragraph in document.paragraphs:
            key = near_duplicate_key(paragraph)
            shingles = list(_shingles([word_ids.setdefault(word, len(word_ids)) for word in key.split()]))
            repeated = sum(shingle in seen_shingles for shingle in shingles)
            if paragraph in texts:
                removed["paragraphs: exact duplicate"] += 1
            elif key in keys or repeated > MAX_REPEATED_SHARE * len(shingles):
                removed["paragraphs: near duplicate"] += 1
            else:
                kept.append(paragraph)
            texts.add(paragraph)
            keys.add(key)
            seen_shingles.update(shingles)
        if kept:
            kept_documents.append(Document(document.group, tuple(kept)))
    return kept_documents


def _shingles(words: list[int]) -> Iterator[tuple[int, ...]]:
    return zip(*(words[start:] for start in range(SHINGLE_WORDS)), strict=False)
