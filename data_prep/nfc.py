"""Unicode's normal form NFC in time that grows with the text alone.

Python sorts the accents that follow a letter by insertion: a letter with 100,000 of them in the wrong order takes
minutes. Long runs of accents are sorted here before it sees them, which changes nothing about the result.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import groupby

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
