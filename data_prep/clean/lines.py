"""Rules that remove lines: each takes a document's lines and returns those that stay.

Most patterns hold for short lines only, so that a paragraph that speaks of cookies or of JavaScript stays. Raffel
et al. (2020), "Exploring the limits of transfer learning with a unified text-to-text transformer", section 2.2, remove
such lines of any length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LineRule = Callable[[Sequence[str]], list[str]]


@dataclass(frozen=True)
class Pattern:
    """Lines of at most ``max_words`` words in which ``regex`` is found go.

    ``keys`` are a quick test: a text in lower case that has none of them has no such line.
    """

    keys: tuple[str, ...]
    regex: re.Pattern[str]
    max_words: int


def _pattern(keys: str, regex: str, max_words: int) -> Pattern:
    return Pattern(tuple(keys.split("|")), re.compile(regex, re.IGNORECASE), max_words)


PATTERNS = {
    "cookies": _pattern(
        "cookie",
        r"\b(?:uses?|using|accept|allow|enable|disable|our) (?:\w+ ){0,3}cookies\b"
        r"|\bcookie (?:policy|settings|preferences|notice|consent)\b",
        60,
    ),
    "policies": _pattern(
        "terms|privacy",
        r"\bterms of (?:use|service)\b|\bterms (?:and|&) conditions\b|\bprivacy (?:policy|statement|notice)\b",
        25,
    ),
    "copyright": _pattern(
        "rights reserved|copyright|©|(c)",
        r"\ball rights reserved\b"
        r"|^(?:copyright\W*)?(?:©|\(c\)).{0,40}\b(?:19|20)\d\d\b|^copyright\W*(?:19|20)\d\d\b",
        40,
    ),
    "javascript": _pattern(
        "javascript",
        r"\bjavascript\b.*\b(?:enabled?|disabled?|required?|requires|supported|browser)\b"
        r"|\b(?:enable|disabled?|requires?|supports?|browser)\b.*\bjavascript\b",
        40,
    ),
    "placeholder": _pattern("lorem ipsum", r"\blorem ipsum\b", 1 << 30),
    "invitations": _pattern(
        "click|read more|continue|sign|log|subscribe|share|follow|like us|skip|advertis|related|leave|back to|print|"
        "e-mail|email|tweet",
        r"^\W*(?:click here|read more|continue reading|sign (?:up|in)|log ?in|subscribe|share (?:this|on)"
        r"|follow us|like us|skip to (?:main )?content|advertisements?\W*$|related (?:articles|posts|stories)"
        r"|leave a (?:comment|reply)|back to top|print this|e-?mail this|tweet this)\b(?!.*[.!?][\"'”’)]*$)",
        8,
    ),
}


def found_in(pattern: Pattern, lines: Sequence[str]) -> list[str]:
    """The lines without those that a pattern is found in."""
    return [line for line in lines if not _is_found(pattern, line)]


def _is_found(pattern: Pattern, line: str) -> bool:
    if not pattern.regex.search(line):
        return False
    return len(line.split(None, pattern.max_words)) <= pattern.max_words


def short_lines(lines: Sequence[str], min_words: int) -> list[str]:
    """Lines of at least ``min_words`` words."""
    return [line for line in lines if len(line.split(None, min_words)) >= min_words]


def repeated_lines(lines: Sequence[str], min_words: int) -> list[str]:
    """A line of ``min_words`` words or more that stood earlier in the document goes; shorter ones may come again."""
    if len(set(lines)) == len(lines):
        return list(lines)
    seen: set[str] = set()
    kept = []
    for line in lines:
        if line in seen and len(line.split(None, min_words)) >= min_words:
            continue
        seen.add(line)
        kept.append(line)
    return kept


MENU_ITEM_WORDS = 3
_SEPARATORS = tuple(f" {character} " for character in "|»›·•/>")
_SEPARATOR = re.compile(r" [|»›·•/>] ")
_SENTENCE_END = (".", "!", "?", ":", ";", ",", "…", '"', "'", "”", "’", ")")


def navigation(lines: Sequence[str], min_lines: int) -> list[str]:
    """Menus: ``min_lines`` or more lines in a row of at most three words without punctuation at the end, and lines of
    four or more such items between bars or arrows (``Home | About | Contact | Help``)."""
    text = "\n".join(lines)
    if any(separator in text for separator in _SEPARATORS):
        lines = [line for line in lines if not _is_menu_line(line)]
    kept: list[str] = []
    run: list[str] = []
    for line in [*lines, None]:
        if line is not None and _is_menu_item(line):
            run.append(line)
            continue
        if len(run) < min_lines:
            kept += run
        run = []
        if line is not None:
            kept.append(line)
    return kept


def _is_menu_item(text: str) -> bool:
    return len(text) < 60 and not text.endswith(_SENTENCE_END) and len(text.split(None, 3)) <= MENU_ITEM_WORDS


def _is_menu_line(line: str) -> bool:
    items = _SEPARATOR.split(line)
    return len(items) >= 4 and all(map(_is_menu_item, items))
