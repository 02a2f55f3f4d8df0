"""Prompts that a model can read, texts that grow from them, and rows of different lengths read side by side.

Spatial weights are indexed by absolute position, so nothing may stand before a sequence: all rows begin at position 0
and are always at the same position. There is no padding: a row that knows its next ids (a longer prompt) reads those,
while the others read what has just been chosen for them.

Letters: ``R`` rows, ``n`` tokens that are read at once, ``H`` width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index

import torch
from torch import Tensor

from smlp.config import ModelConfig
from smlp.errors import UserError
from smlp.inference.generation.settings import Limits
from smlp.nn.decoder import Decoder
from smlp.nn.state import DecodingState


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
    #: likeliest ids at each of them with their log-probabilities, as many as were asked for
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    #: ranking score of beam search; None for sampled texts
    score: float | None = None
    #: its end: "length" (max_tokens), "end" (the id that ends texts), "context" (no position is left) or "stop"
    #: (set by the caller); None while it is being generated
    finish: str | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt that fits the model, and how long its continuations may be."""

    #: ids; padded to the prefix if the model routes by one, cut if the context slides
    tokens: list[int]
    #: most new tokens (in beam search without the end symbol)
    room: int
    #: reason if the text reaches this limit: "length", or "context" if the context sets the limit
    finish: str
    #: tokens that were cut from its beginning
    num_cut: int = 0
    #: whether it was the start symbol alone, before it was padded
    is_empty: bool = False


def ready_prompts(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    fill: int | None = None,
    reads_last: bool = False,
) -> list[Prompt]:
    """Check prompts and find out how many new tokens there is room for.

    Args:
        config: of the model.
        prompts: ids, with the start symbol.
        limits: when a text ends.
        fill: id to put before a prompt that ends within the prefix of a model with ``prefix_tokens``, as often as it
            takes; such a prompt is an error by default, because the model has not learnt to go on from there.
        reads_last: whether the last new token is read as well, to predict the end after it; otherwise it needs no
            position.

    Raises:
        UserError: a prompt is empty or holds something other than ids, or ends within the prefix and ``fill`` is None;
            a text needs more than T positions and is neither to stop nor to slide there, or its prompt fills the
            context; the end is no id; the model's routing is leaky.
    """
    if config.is_leaky:
        raise UserError("a model with feature_routing=leaky reads the tokens that it predicts: it cannot generate text")
    if limits.end is not None:
        _ids(config, [limits.end], "", "end")
    ready = []
    for number, prompt in enumerate(prompts, start=1):
        where = "" if len(prompts) == 1 else f"prompt {number}: "
        given = _ids(config, prompt, where)
        tokens = _filled(config, given, fill, where)
        if limits.when_full == "slide":
            kept = tokens[-config.max_tokens :]
            ready.append(Prompt(kept, limits.max_tokens, "length", len(tokens) - len(kept)))
            continue
        room = config.max_tokens - len(tokens) + (0 if reads_last else 1)
        least = limits.max_tokens if limits.when_full == "refuse" else max(limits.min_tokens, 1)
        if room < least:
            advice = "ask for fewer tokens, "
            if limits.when_full == "stop":
                advice = "" if least == 1 else f"lower min_tokens={least}, "
            can_stop = limits.when_full == "refuse" and not reads_last and room >= 1
            advice += "let texts stop there" if can_stop else "give a shorter prompt"
            raise UserError(
                f"{where}{len(tokens)} prompt tokens (start symbol included) and {least} new ones need "
                f"{least + config.max_tokens - room} positions, but the model has max_tokens={config.max_tokens}: "
                + (advice if reads_last else f"{advice}, or allow sliding")
            )
        finish = "context" if room < limits.max_tokens else "length"
        ready.append(Prompt(tokens, min(room, limits.max_tokens), finish, is_empty=len(given) == 1))
    return ready


def _ids(config: ModelConfig, prompt: Sequence[int], where: str, what: str = "the prompt") -> list[int]:
    """Return the ids of a prompt, or of ``what``, as plain numbers, whatever kind of numbers and sequence they are."""
    try:
        tokens = [index(one) for one in prompt]
    except TypeError:
        tokens = [-1]
    if any(not 0 <= token < config.vocab_size for token in tokens):
        raise UserError(f"{where}{what} must be ids from 0 to {config.vocab_size - 1}, got {prompt!r:.80}")
    return tokens


def banned_ids(config: ModelConfig, banned: Sequence[int]) -> list[int]:
    """Return the ids that are never chosen, checked.

    Raises:
        UserError: one is no id, or no other is left.
    """
    ids = _ids(config, banned, "", "banned")
    if len(set(ids)) == config.vocab_size:
        raise UserError(f"banned has all {config.vocab_size} ids: none is left to choose")
    return ids


def _filled(config: ModelConfig, tokens: list[int], fill: int | None, where: str) -> list[int]:
    if not tokens:
        raise UserError(f"{where}the prompt must hold at least one token")
    least = config.prefix_tokens + 1 if config.prefix_tokens else 1
    if len(tokens) >= least:
        return tokens
    if fill is None:
        raise UserError(
            f"{where}the prompt has {len(tokens)} tokens (start symbol included) and this model needs at least "
            f"{least}: its first ones only choose experts; fill the prefix or give a longer prompt"
        )
    return [fill] * (least - len(tokens)) + tokens


class SharedPositions:
    """Rows of ids and the state of a decoder that has read them up to a common position.

    Args:
        decoder: in evaluation mode.
        rows: known ids of each sequence, at least one each; append to ``rows`` what is chosen.
        capacity: most ids that are read of a row; the state has no room for more.
    """

    def __init__(self, decoder: Decoder, rows: Sequence[Sequence[int]], capacity: int) -> None:
        self.decoder = decoder
        self.rows = [list(row) for row in rows]
        self._capacity = min(capacity, decoder.config.max_tokens)
        self._state = DecodingState(self._capacity)
        #: number of ids dropped from the start of each row
        self._forgotten = 0

    @property
    def num_read(self) -> int:
        """Ids of each row that have been read, forgotten ones included."""
        return self._forgotten + self._state.length

    @property
    def waiting(self) -> list[int]:
        """The rows whose ids have all been read, so that they need another one."""
        return [row for row, ids in enumerate(self.rows) if len(ids) == self.num_read]

    def read(self) -> Tensor:
        """Read as many tokens as every row has; return their hidden states (R, n, H).

        At the end of the context, the later half of every row is read anew from position 0.
        """
        config = self.decoder.config
        shortest = min(map(len, self.rows))
        if shortest - self._forgotten > config.max_tokens:
            self._forgotten = shortest - max(config.max_tokens // 2, config.prefix_tokens + 1)
            self._state = DecodingState(self._capacity)
        start = self.num_read
        tokens_Rn = torch.tensor(
            [ids[start:shortest] for ids in self.rows], device=self.decoder.embedding.weight.device
        )
        return self.decoder.features(tokens_Rn, self._state)[0]

    def keep(self, index: Sequence[int]) -> None:
        """Keep the rows at ``index`` (repeats allowed), in that order."""
        if list(index) == list(range(len(self.rows))):
            return
        self.rows = [list(self.rows[row]) for row in index]
        self._state.reorder(torch.tensor(index, dtype=torch.long, device=self.decoder.embedding.weight.device))
