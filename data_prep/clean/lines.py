"""Rules that remove lines: each takes a document's lines and returns those that stay.

Most patterns hold for short lines only, so that a paragraph that speaks of cookies or of JavaScript stays. Raffel
et al. (2020), "Exploring the limits of transfer learning with a unified text-to-text transformer", section 2.2, remove
such lines of any length.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pattern:
    """Remove lines of at most ``max_characters`` in which ``regex`` is found.

    ``keys`` are a quick test: lines that, in lower case, contain none of them are not searched.
    """

    keys: tuple[str, ...]
    regex: re.Pattern[str]
    max_characters: int

    def without(self, lines: Sequence[str]) -> list[str]:
        """Return the lines that stay."""
        return [line for line in lines if len(line) > self.max_characters or not self.regex.search(line)]


def _pattern(keys: str, regex: str, max_characters: int) -> Pattern:
    return Pattern(tuple(keys.split("|")), re.compile(regex, re.IGNORECASE), max_characters)


PATTERNS = {
    "cookies": _pattern(
        "cookie",
        r"\b(?:uses?|using|accept|allow|enable|disable|our) (?:\w+ ){0,3}cookies\b"
        r"|\bcookie (?:policy|settings|preferences|notice|consent)\b",
        400,
    ),
    "policies": _pattern(
        "terms|privacy",
        r"\bterms of (?:use|service)\b|\bterms (?:and|&) conditions\b|\bprivacy (?:policy|statement|notice)\b",
        160,
    ),
    "copyright": _pattern(
        "rights reserved|copyright|©|(c)",
        r"\ball rights reserved\b"
        r"|^(?:copyright\W*)?(?:©|\(c\)).{0,40}\b(?:19|20)\d\d\b|^copyright\W*(?:19|20)\d\d\b",
        250,
    ),
    "javascript": _pattern(
        "javascript",
        r"\bjavascript\b.*\b(?:enabled?|disabled?|required?|requires|supported|browser)\b"
        r"|\b(?:enable|disabled?|requires?|supports?|browser)\b.*\bjavascript\b",
        250,
    ),
    "placeholder": _pattern("lorem ipsum", r"\blorem ipsum\b", 1 << 30),
    "invitations": _pattern(
        "click|read more|continue|sign|log|subscribe|share|follow|like us|skip|advertis|related|leave|back to|print|"
        "e-mail|email|tweet",
        r"^\W*(?:click here|read more|continue reading|sign (?:up|in)|log ?in|subscribe|share (?:this|on)"
        r"|follow us|like us|skip to (?:main )?content|advertisements?\W*$|related (?:articles|posts|stories)"
        r"|leave a (?:comment|reply)|back to top|print this|e-?mail this|tweet this)\b(?!.*[.!?][\"'”’)]*$)",
        60,
    ),
}


def may_have_notices(lines: Sequence[str]) -> list[str]:
    """Return the names of the patterns that may be found: most lines are longer, or contain none of the keys."""
    by_length: dict[int, str] = {}
    names = []
    for name, pattern in PATTERNS.items():
        limit = pattern.max_characters
        if limit not in by_length:
            by_length[limit] = "\n".join([line for line in lines if len(line) <= limit]).lower()
        if any(key in by_length[limit] for key in pattern.keys):
            names.append(name)
    return names


def short_lines(lines: Sequence[str], min_words: int) -> list[str]:
    """Return the lines of at least ``min_words`` words."""
    return [line for line in lines if len(line.split(None, min_words)) >= min_words]


def repeated_lines(lines: Sequence[str], min_words: int) -> list[str]:
    """Remove lines of ``min_words`` words or more that occurred earlier in the document; shorter ones may repeat."""
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
MENU_LINE_CHARACTERS = 400
_SEPARATORS = tuple(f" {character} " for character in "|»›·•/>")
_SEPARATOR = re.compile(r" [|»›·•/>] ")
_SENTENCE_END = (".", "!", "?", ":", ";", ",", "…", '"', "'", "”", "’", ")")


def navigation(lines: Sequence[str], min_lines: int) -> list[str]:
    """Remove menus.

    A menu is ``min_lines`` or more lines in a row of at most three words without punctuation at the end, or a line of
    four or more such items between bars or arrows (``Home | About | Contact | Help``).
    """
    text = "\n".join([line for line in lines if len(line) <= MENU_LINE_CHARACTERS])
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
    items = _SEPARATOR.split(line) if len(line) <= MENU_LINE_CHARACTERS else ()
    return len(items) >= 4 and all(map(_is_menu_item, items))
