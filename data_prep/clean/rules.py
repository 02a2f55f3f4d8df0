"""Rules that change a document: rules of characters take its text, rules of lines take its lines.

Rules of characters work within lines, so that a line that is removed later changes nothing about its neighbours. Most
patterns of lines apply to short lines only, so that a paragraph about cookies or JavaScript stays. Raffel et al.
(2020), "Exploring the limits of transfer learning with a unified text-to-text transformer", section 2.2, remove such
lines of any length.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html.entities import html5
from itertools import groupby, takewhile

import numpy as np

from data_prep.flow.streams import from_extra

# Accents are neither letters nor spaces. No language uses this many on a letter.
_LONG_RUN = re.compile(r"[^\w\s\x00-\x7f]{32,}")
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_LONGEST_ENTITY = 34  # with & and ;
NOT_ASCII = re.compile(r"[^\x00-\x7f]")
# Control characters that are white space (tabs, line breaks, \x1c to \x1f, \x85) are left to the rule for white space.
_CONTROL_ASCII = bytes([*range(0x09), *range(0x0E, 0x1C), 0x7F])
_OTHER_SPACE = re.compile(r"[^\S\n ]")
_PLAIN = bytes(code for code in range(128) if not chr(code).isspace() or chr(code) in "\n ")
_REMOVED = (
    r"\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f"
    r"\xad"  # soft hyphen
    r"\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"  # zero width, directions
    r"\ufeff\ufff9-\ufffb\ufdd0-\ufdef\ufffe\uffff"  # byte-order mark, annotations, noncharacters
    r"\ud800-\udfff"  # halves of surrogate pairs, which UTF-8 cannot hold
    r"\U000e0000-\U000e007f"  # tags, which hide text
)
_CONTROL = re.compile(
    rf"[{_REMOVED}]+"
    # Joiners are meaningful between letters of scripts that need them and in emoji, but not next to Latin letters.
    r"|(?<![^\x00-\u024f])[\u200c\u200d]+|[\u200c\u200d]+(?![^\x00-\u024f\u200c\u200d])"
)
_MAY_HAVE_CONTROL = re.compile(rf"[{_REMOVED}\u200c\u200d]")  # quicker
# In mojibake, every non-ASCII byte has become a non-ASCII character. So there are two in a row, or a lead byte's
# character before what was a no-break space, or a control character of Latin-1.
_MAY_BE_MOJIBAKE = re.compile(r"[^\x00-\x7f]{2}|[\xc2-\xf4] |[\x80-\x9f]")


def entities(text: str) -> str:
    """Replace HTML entities, ``&amp;`` and ``&#8217;``, also those escaped twice; unknown names stay."""
    if "&" not in text:
        return text
    unescaped = _ENTITY.sub(_character, text)
    return text if unescaped == text else _unescaped_again(unescaped) if _ENTITY.search(unescaped) else unescaped


def _unescaped_again(text: str) -> str:
    """Replace entities within what entities became, to any depth; each character is read a few times at most."""
    done: list[str] = []  # text that no later character can make part of an entity
    begun: list[str] = []  # from each later ``&``: the text so far of the entity that it may begin
    coming = re.split("([&;])", text)[::-1]
    while coming:
        piece = coming.pop()
        if piece == "&" or not begun:
            (begun if piece == "&" else done).append(piece)
            continue
        begun[-1] += piece
        if piece == ";" and (match := _ENTITY.fullmatch(begun[-1])) and (character := _character(match)) != match[0]:
            begun.pop()
            coming += character[::-1]
        elif piece == ";" or len(begun[-1]) >= _LONGEST_ENTITY:  # none of the ``&`` begins an entity
            done += begun
            begun = []
    return "".join(done + begun)


def _character(match: re.Match[str]) -> str:
    name = match[0][1:]
    return html.unescape(match[0]) if name[0] == "#" else html5.get(name, match[0])


def mojibake(text: str) -> str:
    """Repair UTF-8 that was read as something else, ``cafÃ©``, by ftfy, in lines that ftfy finds to be bad."""
    if text.isascii() or not _MAY_BE_MOJIBAKE.search(text):
        return text
    ftfy = from_extra("ftfy", "the rule mojibake needs ftfy: use --without mojibake, or")
    lines = text.split("\n")
    for index, line in enumerate(lines):
        if not line.isascii() and _MAY_BE_MOJIBAKE.search(line) and ftfy.is_bad(line):
            lines[index] = ftfy.fix_encoding(line)
    return "\n".join(lines)


def control(text: str) -> str:
    """Remove control characters, zero-width ones, byte-order marks, soft hyphens and noncharacters."""
    if text.isascii():
        return text.encode().translate(None, _CONTROL_ASCII).decode()
    return _CONTROL.sub("", text) if _MAY_HAVE_CONTROL.search(text) else text


def nfc(text: str) -> str:
    """Return the text in Unicode's form NFC: a letter and its accents become one character, where there is one.

    Python sorts the accents that follow a letter by insertion, which takes minutes for 100,000 of them in the wrong
    order. Long runs of accents are therefore sorted before Python sees them; the result is the same.
    """
    return text if text.isascii() else unicodedata.normalize("NFC", _LONG_RUN.sub(_in_order, text))


def _in_order(run: re.Match[str]) -> str:
    """Decompose a run (NFD) and sort its accents by their combining classes, up to each character of class 0."""
    apart = "".join([unicodedata.normalize("NFD", character) for character in run[0]])
    groups = groupby(apart, key=lambda character: unicodedata.combining(character) > 0)
    return "".join(["".join(sorted(group, key=unicodedata.combining)) for _, group in groups])


def whitespace(text: str) -> str:
    """Leave one space between words, none at the ends of lines, one kind of line break, and no empty lines."""
    if not (_OTHER_SPACE.search(text) if not text.isascii() else text.encode().translate(None, _PLAIN)):
        padded = f"\n{text}\n"
        if not any(pair in padded for pair in ("  ", "\n\n", "\n ", " \n")):
            return text
    return "\n".join(filter(None, [" ".join(line.split()) for line in text.splitlines()]))


def num_changed(old: str, new: str) -> int:
    """Return how many characters of ``old`` are missing in ``new``, or how many were added, whichever is larger."""
    ascii_change = ascii_counts(new) - ascii_counts(old)
    before, after = (Counter(NOT_ASCII.findall(text)) for text in (old, new))
    gone = -int(ascii_change[ascii_change < 0].sum()) + (before - after).total()
    come = int(ascii_change[ascii_change > 0].sum()) + (after - before).total()
    return max(gone, come)


def ascii_counts(text: str) -> np.ndarray:
    """Return how often each character of ASCII occurs: (128,)."""
    return np.bincount(np.frombuffer(text.encode("ascii", "ignore"), dtype=np.uint8), minlength=128)


# Applied in this order, repeatedly until nothing changes.
CHARACTER_RULES = {rule.__name__: rule for rule in (entities, mojibake, control, nfc, whitespace)}


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
        r"|follow us|like us|skip to (?:main )?content|advertisements?(?=\W*$)|related (?:articles|posts|stories)"
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
    four or more such items between bars or arrows (``Home | About | Contact | Help``). Empty lines do not count.
    """
    text = "\n".join([line for line in lines if len(line) <= MENU_LINE_CHARACTERS])
    if any(separator in text for separator in _SEPARATORS):
        lines = [line for line in lines if not _is_menu_line(line)]
    kept: list[str] = []
    run: list[str] = []
    for line in [*lines, None]:
        if line is not None and (_is_menu_item(line) or (run and not line)):
            run.append(line)
            continue
        if sum(map(bool, run)) < min_lines:
            kept += run
        else:
            kept += takewhile(lambda line: not line, reversed(run))  # empty lines behind the menu
        run = []
        if line is not None:
            kept.append(line)
    return kept


def _is_menu_item(text: str) -> bool:
    return 0 < len(text) < 60 and not text.endswith(_SENTENCE_END) and len(text.split(None, 3)) <= MENU_ITEM_WORDS


def _is_menu_line(line: str) -> bool:
    items = _SEPARATOR.split(line) if len(line) <= MENU_LINE_CHARACTERS else ()
    return len(items) >= 4 and all(map(_is_menu_item, items))
