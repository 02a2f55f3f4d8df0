"""Rules that change characters: each takes a text and returns it, changed or not.

All of them work within lines, so that a line that is removed later changes nothing about its neighbours.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections import Counter
from functools import cache
from html.entities import html5
from itertools import groupby
from typing import Any

import numpy as np

# Accents are neither letters nor spaces. No language puts that many on a letter.
_LONG_RUN = re.compile(r"[^\w\s\x00-\x7f]{32,}")


def nfc(text: str) -> str:
    """The text with each letter and its accents as one character, where Unicode has one."""
    return text if text.isascii() else unicodedata.normalize("NFC", _LONG_RUN.sub(_in_order, text))


def _in_order(run: re.Match[str]) -> str:
    """A run taken apart (NFD): accents stand in the order of their combining classes, up to a character of class 0."""
    apart = "".join([unicodedata.normalize("NFD", character) for character in run[0]])
    groups = groupby(apart, key=lambda character: unicodedata.combining(character) > 0)
    return "".join(["".join(sorted(group, key=unicodedata.combining)) for _, group in groups])


_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_LONGEST_ENTITY = 34  # with its ends
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
# Those that are white space (tabs, line breaks, \x1c to \x1f, \x85) are left to that rule.
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
    # Joiners mean something between letters of scripts that need them, and in emoji; beside Latin ones nothing.
    r"|(?<![^\x00-\u024f])[\u200c\u200d]+|[\u200c\u200d]+(?![^\x00-\u024f\u200c\u200d])"
)
_MAY_HAVE_CONTROL = re.compile(rf"[{_REMOVED}\u200c\u200d]")  # quicker
# Every byte of UTF-8 that is no ASCII has become a character that is none: there are two in a row, or a lead byte's
# character before what was a no-break space, or a control character of Latin-1.
_MAY_BE_MOJIBAKE = re.compile(r"[^\x00-\x7f]{2}|[\xc2-\xf4] |[\x80-\x9f]")


def entities(text: str) -> str:
    """HTML entities left over, ``&amp;`` and ``&#8217;``, also escaped twice; unknown names stay."""
    if "&" not in text:
        return text
    unescaped = _ENTITY.sub(_character, text)
    return text if unescaped == text else _unescaped_again(unescaped) if _ENTITY.search(unescaped) else unescaped


def _unescaped_again(text: str) -> str:
    """Entities in what entities have become, to any depth, in one pass: each character is read a few times at most."""
    done: list[str] = []  # what no later character can make part of an entity
    begun: list[str] = []  # from each ``&`` behind that: what has come so far of the entity that it may begin
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
        elif piece == ";" or len(begun[-1]) >= _LONGEST_ENTITY:  # no entity, nor is any that an earlier ``&`` begins
            done += begun
            begun = []
    return "".join(done + begun)


def _character(match: re.Match[str]) -> str:
    name = match[0][1:]
    return html.unescape(match[0]) if name[0] == "#" else html5.get(name, match[0])


def mojibake(text: str) -> str:
    """UTF-8 that was read as something else, ``cafÃ©``, put right by ftfy in lines that it says are bad."""
    if text.isascii() or not _MAY_BE_MOJIBAKE.search(text):
        return text
    fixer = _fixer()
    lines = text.split("\n")
    for index, line in enumerate(lines):
        if not line.isascii() and _MAY_BE_MOJIBAKE.search(line) and fixer.is_bad(line):
            lines[index] = fixer.fix_encoding(line)
    return "\n".join(lines)


@cache
def _fixer() -> Any:
    import ftfy

    return ftfy


def control(text: str) -> str:
    """Removes control characters, zero-width ones, byte-order marks, soft hyphens, what is no character at all."""
    if text.isascii():
        return text.encode().translate(None, _CONTROL_ASCII).decode()
    return _CONTROL.sub("", text) if _MAY_HAVE_CONTROL.search(text) else text


def whitespace(text: str) -> str:
    """One space between words, none at the ends of lines, every kind of line break as one, no empty lines."""
    if not (_OTHER_SPACE.search(text) if not text.isascii() else text.encode().translate(None, _PLAIN)):
        padded = f"\n{text}\n"
        if not any(pair in padded for pair in ("  ", "\n\n", "\n ", " \n")):
            return text
    return "\n".join(filter(None, [" ".join(line.split()) for line in text.splitlines()]))


def num_changed(old: str, new: str) -> int:
    """Characters of ``old`` that ``new`` does not have (as often), or that it has besides, whichever are more."""
    ascii_change = _ascii_counts(new) - _ascii_counts(old)
    before, after = (Counter(_NOT_ASCII.findall(text)) for text in (old, new))
    gone = -int(ascii_change[ascii_change < 0].sum()) + (before - after).total()
    come = int(ascii_change[ascii_change > 0].sum()) + (after - before).total()
    return max(gone, come)


def _ascii_counts(text: str) -> np.ndarray:
    return np.bincount(np.frombuffer(text.encode("ascii", "ignore"), dtype=np.uint8), minlength=128)


# In the order in which they are applied, again and again until nothing changes.
RULES = {rule.__name__: rule for rule in (entities, mojibake, control, nfc, whitespace)}
