"""Apply all rules to one document, in order, and count their changes."""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data_prep.clean import filters, rules
from data_prep.clean.filters import FILTERS, Measures, Thresholds, excerpt, is_in, option

# Character rules affect each other: an entity may become a control character. Each level of such entities inside each
# other takes a round over the text.
MAX_ROUNDS = 100

LINE_RULES = (*rules.PATTERNS, "short-lines", "repeated-lines", "navigation")
RULES = (*rules.CHARACTER_RULES, *LINE_RULES, *FILTERS, "language")


@dataclass(frozen=True)
class Cleaning(Thresholds):
    """The rules that :func:`clean` applies, with the thresholds of the filters."""

    off: frozenset[str] = frozenset()  # names of rules that are not applied
    language: str = "en"  # code of the language that documents must be in, or "any"
    min_line_words: int = option(0, "short-lines", "remove lines with fewer words; 0 keeps them")
    repeated_line_words: int = option(
        5, "repeated-lines", "remove lines of at least N words that occurred earlier in the document"
    )
    menu_lines: int = option(5, "navigation", "remove N or more lines in a row of up to three words, as a menu")
    min_probability: float = option(0.65, "language", "drop documents with a lower probability of --language")
    language_characters: int = option(500, "language", "detect the language from the first N characters of a document")

    @property
    def names_language(self) -> bool:
        return self.language != "any" and "language" not in self.off


def load(settings: Cleaning) -> None:
    """Load the language model and ftfy, as far as the rules need them, before the first document does."""
    if settings.names_language:
        filters.languages()
    if "mojibake" not in settings.off:
        with contextlib.suppress(ImportError):  # ASCII text does not need it
            importlib.import_module("ftfy")


def clean(text: str, settings: Cleaning, tally: Counter[str]) -> tuple[str, str]:
    """Apply the rules to a document. Cleaning the result again changes nothing.

    ``tally`` receives the numbers of characters changed and lines removed, by rule.

    Returns:
        The text, and the name of the rule that drops the document: "" if it is kept, "empty" if nothing is left.
    """
    text = clean_characters(text, settings.off, tally)
    repeated_before = filters.share_repeated(text.split("\n"))
    text, kept_lines = clean_lines(text, settings, tally)
    if not text.strip():
        return "", "empty"
    document = Measures(text, kept_lines)
    for name, drops in FILTERS.items():
        if name in settings.off or (name == "stop-words" and settings.language != "en"):
            continue
        was_repetitive = name == "many-repeated-lines" and repeated_before > settings.max_repeated_lines
        if was_repetitive or drops(document, settings):
            return text, name
    if settings.names_language:
        beginning = excerpt(text, settings.language_characters)
        if not is_in(beginning, settings.language, settings.min_probability):
            return text, "language"
    return text, ""


def clean_characters(text: str, off: frozenset[str], tally: Counter[str]) -> str:
    """Apply the rules of characters until they change nothing, or :data:`MAX_ROUNDS` times."""
    for _ in range(MAX_ROUNDS):
        before = text
        for name, rule in rules.CHARACTER_RULES.items():
            if name in off:
                continue
            changed = rule(text)
            if changed != text:
                tally[f"{name}: characters changed"] += rules.num_changed(text, changed)
                text = changed
        if text == before:
            break
    return text


def clean_lines(text: str, settings: Cleaning, tally: Counter[str]) -> tuple[str, list[str]]:
    """Apply the rules of lines; return the text and its lines."""
    kept = text.split("\n")
    steps: dict[str, Callable[[Sequence[str]], list[str]]] = {
        **{name: rules.PATTERNS[name].without for name in rules.may_have_notices(kept)},
        "short-lines": lambda lines: rules.short_lines(lines, settings.min_line_words),
        "repeated-lines": lambda lines: rules.repeated_lines(lines, settings.repeated_line_words),
        "navigation": lambda lines: rules.navigation(lines, settings.menu_lines),
    }
    for name, step in steps.items():
        if name not in settings.off:
            before, kept = len(kept), step(kept)
            if len(kept) != before:
                tally[f"{name}: lines removed"] += before - len(kept)
    return "\n".join(kept), kept
