"""All rules in their order, on one document."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from data_prep.clean import characters, filters, lines
from data_prep.clean.filters import FILTERS, Measures, Thresholds, excerpt, is_in, option

# Rules of characters feed each other (an entity becomes a control character); more rounds than this were never seen.
MAX_ROUNDS = 10

LINE_RULES = (*lines.PATTERNS, "short-lines", "repeated-lines", "navigation")
RULES = (*characters.RULES, *LINE_RULES, *FILTERS, "language")


@dataclass(frozen=True)
class Cleaning:
    """What :func:`clean` does."""

    off: frozenset[str] = frozenset()  # names of rules that are not applied
    thresholds: Thresholds = field(default_factory=Thresholds)  # of the filters
    language: str = "en"  # code of the language that documents must be in, or "any"
    min_line_words: int = option(0, "lines of fewer words are removed; 0 keeps them")
    repeated_line_words: int = option(5, "a line of so many words that comes again in a document is removed")
    menu_lines: int = option(5, "so many lines of up to three words in a row are a menu, and removed")
    min_probability: float = option(0.65, "less probably in --language: dropped")
    language_characters: int = option(500, "of a document, from its beginning, that tell its language")


def clean(text: str, settings: Cleaning, tally: Counter[str]) -> tuple[str, str]:
    """Applies the rules to a document; what it returns stays as it is if it is cleaned again.

    Args:
        text: of the document.
        settings: which rules, and their thresholds.
        tally: characters changed and lines removed are added here, by rule.

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
        if drops(document, settings.thresholds):
            return text, name
        if name == "many-repeated-lines" and repeated_before > settings.thresholds.max_repeated_lines:
            return text, name
    if settings.language != "any" and "language" not in settings.off:
        beginning = excerpt(text, settings.language_characters)
        if not is_in(beginning, settings.language, settings.min_probability):
            return text, "language"
    return text, ""


def clean_characters(text: str, off: frozenset[str], tally: Counter[str]) -> str:
    """The text after the rules of characters, applied until they change nothing."""
    for _ in range(MAX_ROUNDS):
        before = text
        for name, rule in characters.RULES.items():
            if name in off:
                continue
            changed = rule(text)
            if changed != text:
                tally[f"{name}: characters changed"] += characters.num_changed(text, changed)
                text = changed
        if text == before:
            break
    return text


def clean_lines(text: str, settings: Cleaning, tally: Counter[str]) -> tuple[str, list[str]]:
    """The text after the rules of lines, and its lines."""
    kept = text.split("\n")
    notices = lines.may_have_notices(kept)
    for name in LINE_RULES:
        if name in settings.off:
            continue
        number = len(kept)
        if name in lines.PATTERNS:
            kept = lines.without_notices(kept, lines.PATTERNS[name]) if name in notices else kept
        elif name == "short-lines":
            kept = lines.short_lines(kept, settings.min_line_words) if settings.min_line_words else kept
        elif name == "repeated-lines":
            kept = lines.repeated_lines(kept, settings.repeated_line_words)
        else:
            kept = lines.navigation(kept, settings.menu_lines)
        if len(kept) != number:
            tally[f"{name}: lines removed"] += number - len(kept)
    return "\n".join(kept), kept
