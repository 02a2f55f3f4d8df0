"""Writing text token by token from a decoder, with cached state.

Letters: ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smlp.context import DecodingState
from smlp.errors import UserError
from smlp.nn.decoder import Decoder


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Raises:
        UserError: a value is out of range.
    """

    #: 0 takes the likeliest token always (greedy)
    temperature: float = 1.0
    #: only the k likeliest tokens are drawn, and those that tie with the last of them; 0 for all
    top_k: int = 0
    #: only the likeliest tokens whose probabilities sum to at least p are drawn; 1 for all
    top_p: float = 1.0
    #: the same seed gives the same text
    seed: int = 1
    #: at the end of the context, keep the later half of the text and go on, instead of an error
    slide: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature must be a number of at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top_k must not be negative, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], got {self.top_p}")


def generate(
    decoder: Decoder,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    banned: Sequence[int] = (),
    fill: int | None = None,
) -> Iterator[int]:
    """Continues one sequence of ids; yields each new id as it is chosen.

    Each step costs one row of the spatial weights for each layer; no earlier token is computed again, except after a
    slide, when the kept half is read once.

    Args:
        decoder: put in evaluation mode by the caller.
        prompt: ids, at least one (fairseq's models start with ``</s>``).
        max_new_tokens: how many to yield.
        sampling: how to choose; by default from the full distribution.
        banned: ids that are never chosen.
        fill: id to put before a prompt that ends within the prefix of a model with ``prefix_tokens``, as often as it
            takes; such a prompt is an error by default, because the model has not learnt to go on from there.

    Raises:
        UserError: the prompt ends within the prefix and ``fill`` is None, or the model's routing is leaky.
        UserError: prompt and new tokens need more than the model's T positions and ``sampling.slide`` is off; before
            anything is yielded.
    """
    sampling = sampling or Sampling()
    max_tokens = decoder.config.max_tokens
    if not prompt:
        raise UserError("the prompt must hold at least one token")
    if decoder.config.is_leaky:
        raise UserError("a model with feature_routing=leaky needs the tokens that it is to write, so it cannot write")
    least = decoder.config.prefix_tokens + 1 if decoder.config.prefix_tokens else 0
    if len(prompt) < least:
        if fill is None:
            raise UserError(
                f"the prompt has {len(prompt)} tokens (start symbol included) and this model needs at least {least}: "
                "its first ones only choose experts; fill the prefix or give a longer prompt"
            )
        prompt = [fill] * (least - len(prompt)) + list(prompt)
    # The last new token is never read, so it needs no position.
    needed = len(prompt) + max_new_tokens - 1
    if needed > max_tokens and not sampling.slide:
        raise UserError(
            f"{len(prompt)} prompt tokens (start symbol included) and {max_new_tokens} new ones need {needed} "
            f"positions and the model has max_tokens={max_tokens}: ask for fewer tokens or allow sliding"
        )
    return _steps(decoder, list(prompt), max_new_tokens, sampling, list(banned))


@torch.no_grad()
def _steps(
    decoder: Decoder, tokens: list[int], max_new_tokens: int, sampling: Sampling, banned: list[int]
) -> Iterator[int]:
    device = decoder.embedding.weight.device
    generator = torch.Generator().manual_seed(sampling.seed)
    max_tokens = decoder.config.max_tokens
    state = DecodingState()
    unread = tokens[-max_tokens:]
    for _ in range(max_new_tokens):
        if state.length + len(unread) > max_tokens:
            state, unread = DecodingState(), tokens[-max(max_tokens // 2, decoder.config.prefix_tokens + 1) :]
        features = decoder.features(torch.tensor([unread], device=device), state)[0]
        logits_V = decoder.project(features[:, -1])[0].float().cpu()
        logits_V[banned] = -torch.inf
        token = choose(logits_V, sampling, generator)
        tokens.append(token)
        unread = [token]
        yield token


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from logits (V,); ties between likeliest tokens go to the lowest id."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V / sampling.temperature
    if 0 < sampling.top_k < logits_V.numel():
        threshold = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < threshold, -torch.inf)
    probabilities, ids = logits_V.softmax(0).sort(descending=True, stable=True)
    if sampling.top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
