"""Rules that drop documents, by their measures and by their language.

Thresholds marked Gopher are those of Rae et al. (2021), "Scaling language models: methods, analysis & insights from
training Gopher", appendix A.1.1; the others are our own.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np

from data_prep.clean.rules import NOT_ASCII, ascii_counts
from smlp.errors import UserError

STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))  # Gopher
# Gopher, table A1: n, and the largest share of characters for an n-gram
TOP_NGRAMS = {2: 0.20, 3: 0.18, 4: 0.16}  # the most frequent n-gram
REPEATED_NGRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}  # all repeated n-grams
NGRAM_MIN_WORDS = 50  # Gopher drops shorter documents, in which even a single repeated pair of words has a large share
_HASH_FACTOR = np.int64(0x5851F42D4C957F2D)

_MOST_OF_A_WORD = 50  # characters that may be left out to end with a whole word

_PUNCTUATION = ".,;:!?'\"()-"
_JOINERS = "\u200c\u200d"
_MARKS = "•§¶†‡※‰‱⁂％＃＆＠＊＼"  # Unicode's punctuation, but symbols as those of ASCII are
_NO_SYMBOLS = ("P", "Mn", "Mc")  # beginnings of Unicode's categories of punctuation, vowel signs and accents


def _kinds(c: str) -> list[bool]:
    """Return whether a character is visible, a letter, a capital, a digit, a symbol."""
    if c.isascii():
        is_text = c in _PUNCTUATION
    else:
        is_text = c in _JOINERS or (unicodedata.category(c).startswith(_NO_SYMBOLS) and c not in _MARKS)
    return [not c.isspace(), c.isalpha(), c.isupper(), c.isdigit(), not (is_text or c.isalnum() or c.isspace())]


_ASCII_KINDS = np.array([_kinds(chr(code)) for code in range(128)])


def option(default: float, rule: str, help: str) -> Any:
    """Declare a number of a rule that an option of the same name sets; ``help`` documents both."""
    return field(default=default, metadata={"rule": rule, "help": help})


@dataclass(frozen=True)
class Thresholds:
    """Limits that a document must keep; shares are from 0 to 1."""

    min_words: int = option(20, "few-words", "drop documents with fewer words")
    max_words: int = option(1_000_000, "many-words", "drop documents with more words")
    min_word_length: float = option(
        3.0, "word-length", "drop documents whose words are shorter on average, in characters"
    )  # Gopher
    max_word_length: float = option(10.0, "word-length", "drop documents whose words are longer on average")  # Gopher
    max_symbols: float = option(
        0.1, "symbols", "drop documents with a greater share of symbols (neither letter, accent, digit nor punctuation)"
    )
    max_digits: float = option(0.2, "digits", "drop documents with a greater share of digits")
    max_upper_case: float = option(
        0.5, "upper-case", "drop documents with a greater share of capitals among their letters"
    )
    max_undecodable: float = option(0.001, "undecodable", "drop documents with a greater share of U+FFFD")
    min_stop_words: int = option(
        2,
        "stop-words",
        "drop documents with fewer different words of the, be, to, of, and, that, have, with (--language en only)",
    )  # Gopher
    max_repeated_lines: float = option(
        0.3, "many-repeated-lines", "drop documents with a greater share of repeated lines"
    )  # Gopher


@dataclass
class Measures:
    """Measures of a document for the filters, each computed when first needed."""

    text: str
    lines: list[str] = field(default_factory=list)

    @cached_property
    def words(self) -> list[str]:
        return self.text.split()

    @cached_property
    def shares(self) -> dict[str, float]:
        """Shares of ``symbols`` and ``digits`` among visible characters, and of ``upper`` case among letters."""
        totals = ascii_counts(self.text) @ _ASCII_KINDS
        if others := Counter(NOT_ASCII.findall(self.text)):
            totals += np.array([*others.values()]) @ np.array([_kinds(character) for character in others])
        visible, letters, upper, digits, symbols = totals.tolist()
        return {
            "symbols": symbols / max(visible, 1),
            "digits": digits / max(visible, 1),
            "upper": upper / max(letters, 1),
        }


def share_repeated(lines: list[str]) -> float:
    """Return the share of the lines that occurred earlier; empty ones do not count."""
    lines = [line for line in lines if line]
    return (len(lines) - len(set(lines))) / len(lines) if lines else 0.0


def exceeds_ngram_share(words: list[str]) -> bool:
    """Return whether, for some n, too great a share of the characters (without spaces) is in repeated n-grams.

    For an n of ``TOP_NGRAMS``, the share of the most frequent n-gram counts, if it occurs more than once: its count
    times its length. For one of ``REPEATED_NGRAMS``, the share of all words in an n-gram that occurred earlier counts,
    each word once. n-grams are compared by a 64-bit hash. Bounds of these shares decide most documents.
    """
    ids = np.fromiter(map(hash, words), dtype=np.int64, count=len(words))
    lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
    before = np.concatenate(([0], np.cumsum(lengths)))  # characters before each word, and of all
    keys, commonest, num_repeated = ids, len(ids), len(ids)
    for n, threshold in {**TOP_NGRAMS, **REPEATED_NGRAMS}.items():
        keys = keys[:-1] * _HASH_FACTOR + ids[n - 1 :]
        longest, allowed = int((before[n:] - before[:-n]).max()), threshold * before[-1]
        # The share of repeated shorter n-grams bounds that of longer ones.
        if (commonest if n in TOP_NGRAMS else num_repeated) * longest <= allowed:
            continue
        ordered = np.sort(keys)
        same = ordered[1:] == ordered[:-1]
        num_repeated = int(np.count_nonzero(same))
        if num_repeated * 2 * longest <= min(REPEATED_NGRAMS.values()) * before[-1] and n >= min(REPEATED_NGRAMS):
            return False  # n-grams of up to twice as many words repeat less
        if n in TOP_NGRAMS:
            edges = np.flatnonzero(np.concatenate(([True], ~same, [True])))
            commonest = int((edges[1:] - edges[:-1]).max())
            if commonest * longest > allowed and _top_characters(keys, before, n) > allowed:
                return True
        elif num_repeated * longest > allowed and _repeated_characters(keys, lengths, n) > allowed:
            return True
    return False


def _top_characters(keys: np.ndarray, before: np.ndarray, n: int) -> int:
    """Return the number of characters in the n-gram that covers most, among those that occur more than once."""
    _, first, counts = np.unique(keys, return_index=True, return_counts=True)
    characters = counts * (before[first + n] - before[first])
    return int(characters[counts > 1].max(initial=0))


def _repeated_characters(keys: np.ndarray, lengths: np.ndarray, n: int) -> int:
    """Return the number of characters of words in n-grams that occurred earlier."""
    later = np.ones(len(keys), dtype=bool)
    later[np.unique(keys, return_index=True)[1]] = False
    edges = np.zeros(len(lengths) + 1, dtype=np.int64)
    edges[:-n][later] += 1
    edges[n:][later] -= 1
    return int(lengths[np.cumsum(edges[:-1]) > 0].sum())


def word_length(document: Measures) -> float:
    """Return the mean length of the words of a document, in characters."""
    return sum(map(len, document.words)) / max(len(document.words), 1)


# Rules for documents, in the order in which they are applied; the language comes last because it costs most.
FILTERS: dict[str, Callable[[Measures, Thresholds], bool]] = {
    "few-words": lambda document, limit: len(document.words) < limit.min_words,
    "many-words": lambda document, limit: len(document.words) > limit.max_words,
    "word-length": lambda document, limit: not limit.min_word_length <= word_length(document) <= limit.max_word_length,
    "undecodable": lambda document, limit: document.text.count("\ufffd") > limit.max_undecodable * len(document.text),
    "symbols": lambda document, limit: document.shares["symbols"] > limit.max_symbols,
    "digits": lambda document, limit: document.shares["digits"] > limit.max_digits,
    "upper-case": lambda document, limit: document.shares["upper"] > limit.max_upper_case,
    # a list or a table rather than text
    "stop-words": lambda document, limit: (
        len(STOP_WORDS.intersection(map(str.lower, document.words))) < limit.min_stop_words
    ),
    "many-repeated-lines": lambda document, limit: share_repeated(document.lines) > limit.max_repeated_lines,
    "repeated-ngrams": lambda document, limit: (
        len(document.words) >= NGRAM_MIN_WORDS and exceeds_ngram_share(document.words)
    ),
}


@cache
def _identifier() -> Any:
    """Load the model once in each process, which takes about a second and 100 MB."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise UserError("--language: install the extra 'data' (pip install -e '.[data]'), or use any") from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def languages() -> list[str]:
    """Return the codes of the languages that the model knows."""
    return sorted(_identifier().labels)


def is_in(text: str, language: str, min_probability: float) -> bool:
    """Return whether a text is most probably in a language, with at least this probability (0 to 1)."""
    found, probability = _identifier().classify(text)
    return found == language and probability >= min_probability


def excerpt(text: str, num_characters: int) -> str:
    """Return the beginning of a text, up to the end of a word if one ends near."""
    if len(text) <= num_characters:
        return text
    beginning = text[:num_characters]
    end = beginning.rfind(" ", max(num_characters - _MOST_OF_A_WORD, 0))
    return beginning[:end] if end > 0 else beginning  # some languages put no spaces between words
