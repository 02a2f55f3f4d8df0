"""A text that is being written, and what it has become in the end."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Text:
    """One continuation of one prompt."""

    #: number of its prompt, counted from 0
    prompt: int
    #: its number among the continuations of the prompt, counted from 0; in beam search by rank
    draw: int = 0
    #: new ids, with the one that ends the text
    tokens: list[int] = field(default_factory=list)
    #: natural logarithm of the model's probability of each of them, before temperature, penalties and bans
    log_probs: list[float] = field(default_factory=list)
    #: what beam search ranks by; None for sampled texts
    score: float | None = None
    #: why it ended: "length" (max_tokens), "end" (the id that ends texts), "context" (no position is left) or "stop"
    #: (set from outside); None while it is written
    finish: str | None = None
