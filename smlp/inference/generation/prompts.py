"""Prompts as a model can read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smlp.config import ModelConfig
from smlp.errors import UserError
from smlp.inference.generation.settings import Limits


@dataclass(frozen=True)
class Prompt:
    """A prompt that fits the model, and how long its continuations may be."""

    #: ids, filled up where the model routes by a prefix, cut where the text slides anyway
    tokens: list[int]
    #: most new tokens (in beam search without the end symbol)
    room: int
    #: why a text of so many new tokens ends: "length", or "context" where that is what sets the room
    finish: str
    #: tokens that were cut from its beginning
    num_cut: int = 0


def ready_prompts(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    fill: int | None = None,
    reads_last: bool = False,
) -> list[Prompt]:
    """Checks prompts and finds out how many new tokens there is room for.

    Args:
        config: of the model.
        prompts: ids, with the start symbol.
        limits: when a text ends.
        fill: id to put before a prompt that ends within the prefix of a model with ``prefix_tokens``, as often as it
            takes; such a prompt is an error by default, because the model has not learnt to go on from there.
        reads_last: whether the last new token is read as well, to predict the end after it; otherwise it needs no
            position.

    Raises:
        UserError: a prompt is empty, or ends within the prefix and ``fill`` is None; a text needs more than T positions
            and is neither to stop nor to slide there, or its prompt fills the context; the model's routing is leaky.
    """
    if config.is_leaky:
        raise UserError("a model with feature_routing=leaky needs the tokens that it is to write, so it cannot write")
    ready = []
    for number, prompt in enumerate(prompts, start=1):
        where = "" if len(prompts) == 1 else f"prompt {number}: "
        tokens = _filled(config, list(prompt), fill, where)
        if limits.when_full == "slide":
            kept = tokens[-config.max_tokens :]
            ready.append(Prompt(kept, limits.max_tokens, "length", len(tokens) - len(kept)))
            continue
        room = config.max_tokens - len(tokens) + (0 if reads_last else 1)
        if room < (limits.max_tokens if limits.when_full == "refuse" else max(limits.min_tokens, 1)):
            raise UserError(
                f"{where}{len(tokens)} prompt tokens (start symbol included) and {limits.max_tokens} new ones need "
                f"{limits.max_tokens + config.max_tokens - room} positions and the model has "
                f"max_tokens={config.max_tokens}: ask for fewer tokens, "
                + ("give a shorter prompt" if reads_last or room < 1 else "let texts stop there")
                + ("" if reads_last else ", or allow sliding")
            )
        finish = "context" if room < limits.max_tokens else "length"
        ready.append(Prompt(tokens, min(room, limits.max_tokens), finish))
    return ready


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
