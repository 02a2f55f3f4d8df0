"""What language a document is in, by py3langid."""

from __future__ import annotations

from functools import cache
from typing import Any

from smlp.errors import UserError


@cache
def _identifier() -> Any:
    """Loaded once in each process: a second or so, and about 100 MB."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise UserError("--language: install the extra 'data' (pip install 'smlp[data]'), or use any") from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def languages() -> list[str]:
    """Codes of the languages that are told apart."""
    return sorted(_identifier().labels)


def is_in(text: str, language: str, min_probability: float) -> bool:
    """Whether a text is most probably in a language, with this probability (0 to 1) among all that are known."""
    found, probability = _identifier().classify(text)
    return found == language and probability >= min_probability


def excerpt(text: str, num_characters: int) -> str:
    """The beginning of a text, to the end of a word."""
    if len(text) <= num_characters:
        return text
    return text[:num_characters].rpartition(" ")[0] or text[:num_characters]
