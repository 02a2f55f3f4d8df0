"""All rules in their order, on one document."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from data_prep.clean import characters, filters, lines
from data_prep.clean.filters import FILTERS, Measures, Thresholds, excerpt, is_in

# Rules of characters feed each other (an entity becomes a control character); more rounds than this were never seen.
MAX_ROUNDS = 10

LINE_RULES = (*lines.PATTERNS, "short-lines", "repeated-lines", "navigation")
RULES = (*characters.RULES, *LINE_RULES, *FILTERS, "language")


@dataclass(frozen=True)
class Settings:
    """What :func:`clean` does.

    Attributes:
        off: names of rules that are not applied.
        thresholds: of the filters.
        min_line_words: of the rule short-lines; 0 keeps all.
        repeated_line_words: shorter lines may be repeated.
        menu_lines: lines of a menu, at least.
        language: code of the language that documents must be in, or "any".
        min_probability: of that language.
        language_characters: from the beginning of a document, that its language is told by.
    """

    off: frozenset[str] = frozenset()
    thresholds: Thresholds = field(default_factory=Thresholds)
    min_line_words: int = 0
    repeated_line_words: int = 5
    menu_lines: int = 5
    language: str = "en"
    min_probability: float = 0.65
    language_characters: int = 500


def clean(text: str, settings: Settings, tally: Counter[str]) -> tuple[str, str]:
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


def clean_lines(text: str, settings: Settings, tally: Counter[str]) -> tuple[str, list[str]]:
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
