"""Settings for choosing tokens and ending texts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from smlp.config.settings import check_choices, require

#: what to do with a text that needs more than the model's context
WHEN_FULL = ("refuse", "stop", "slide")


#: beyond this, float32 results would be zeros and infinities
_TINY, _HUGE = 1e-30, 1e30
#: a text's length to a higher power would overflow float64
_MAX_LENGTH_PENALTY = 50
#: counted in 32 bits, signed
_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class Sampling:
    """Settings for drawing the next token.

    Raises:
        UserError: a value is out of range.
    """

    #: 0 always takes the most likely token (greedy)
    temperature: float = 1.0
    #: draw only from the k most likely tokens and ties with the last of them; 0 for all
    top_k: int = 0
    #: draw only from the most likely tokens whose probabilities sum to at least p; 1 for all
    top_p: float = 1.0
    #: logits of tokens that already occur in the text (prompt included) are divided by it if positive, multiplied by it
    #: if negative (Keskar et al., 2019); 1 has no effect
    repetition_penalty: float = 1.0
    #: the same seed and prompt give the same text
    seed: int = 1

    def __post_init__(self) -> None:
        check_choices(self)
        require(
            self.temperature == 0 or _TINY <= self.temperature <= _HUGE,
            f"temperature must be 0 or from {_TINY:g} to {_HUGE:g}, got {self.temperature}",
        )
        require(self.top_k >= 0, f"top_k must not be negative, got {self.top_k}")
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        require(
            1 <= self.repetition_penalty <= _HUGE,
            f"repetition_penalty must be from 1 to {_HUGE:g}, got {self.repetition_penalty}",
        )
        require(0 <= self.seed < 2**63, f"seed must be at least 0 and below 2**63, got {self.seed}")


@dataclass(frozen=True)
class BeamSearch:
    """Settings for searching the likeliest texts.

    Raises:
        UserError: a value is out of range.
    """

    #: hypotheses that are kept at every step, and that are finished before a search ends
    size: int = 5
    #: hypotheses are ranked by log-probability / length ** length_penalty; 0 ranks by the probability itself, which
    #: favours short texts, and larger values favour long ones
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_choices(self, "beam ")
        require(self.size >= 1, f"beam must be at least 1, got {self.size}")
        require(
            abs(self.length_penalty) <= _MAX_LENGTH_PENALTY,
            f"length_penalty must be from {-_MAX_LENGTH_PENALTY} to {_MAX_LENGTH_PENALTY}, got {self.length_penalty}",
        )


@dataclass(frozen=True)
class Limits:
    """Conditions that end a text.

    Raises:
        UserError: a value is out of range.
    """

    #: most new tokens
    max_tokens: int = 50
    #: ``end`` is not chosen before this many new tokens
    min_tokens: int = 0
    #: id that ends a text (``</s>``), or None where it is a token like others; beam search needs one
    end: int | None = None
    #: where prompt and new tokens need more than the model's T positions: "refuse" before anything is written; "stop"
    #: the text at the last position; "slide": forget the earlier half and go on (not in beam search)
    when_full: str = "refuse"

    def __post_init__(self) -> None:
        check_choices(self)
        require(
            1 <= self.max_tokens <= _MAX_TOKENS, f"max_tokens must be from 1 to {_MAX_TOKENS}, got {self.max_tokens}"
        )
        require(
            0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens must be between 0 and max_tokens={self.max_tokens}, got {self.min_tokens}",
        )
        require(
            self.min_tokens == 0 or self.end is not None,
            f"min_tokens={self.min_tokens} says for how many tokens </s> is excluded, but </s> does not end "
            "texts here: use beam search or stop_at_eos as well",
        )
        require(self.when_full in WHEN_FULL, f"when_full must be one of {', '.join(WHEN_FULL)}, got {self.when_full!r}")


def method_of(greedy: bool = False, beam: int | None = None, **settings: Any) -> Sampling | BeamSearch:
    """Return the method that the settings select: beam search if ``beam`` is given, otherwise sampling.

    Args:
        greedy: the same as ``temperature=0``.
        beam: hypotheses of a beam search.
        **settings: fields of :class:`Sampling`; with ``beam``, of :class:`BeamSearch`.

    Raises:
        UserError: settings cannot be combined, or a value is out of range.
    """
    of_sampling = {field.name for field in dataclasses.fields(Sampling)}
    of_beam_search = {field.name for field in dataclasses.fields(BeamSearch)} - {"size"}
    for name in settings:
        require(name in of_sampling | of_beam_search, f"there is no generation setting {name!r}")
    require(isinstance(greedy, bool), f"greedy must be True or False, got {greedy!r}")
    if beam is not None:
        drawn = [*(["greedy"] if greedy else []), *(name for name in settings if name in of_sampling)]
        require(not drawn, f"beam={beam} does not sample tokens, so it cannot be combined with {', '.join(drawn)}")
        return BeamSearch(beam, **settings)
    searched = [name for name in settings if name in of_beam_search]
    require(not searched, f"{', '.join(searched)} needs a beam search: give beam as well")
    if greedy:
        drawn = [name for name in ("temperature", "top_k", "top_p", "seed") if name in settings]
        require(not drawn, f"greedy always takes the likeliest token, so it cannot be combined with {', '.join(drawn)}")
        settings["temperature"] = 0.0
    return Sampling(**settings)
