"""Measure what greedy routing costs in evaluation, and how evenly it uses the experts.

    python scripts/routing_report.py --path checkpoint_best.pt --data data-bin [--subset valid]

Evaluates a checkpoint three times on the same blocks: with each token's best expert (as in all evaluation); with
balanced assignment over batches (as in training; it sees later tokens, so it is a diagnosis, not a result); and with
each token's best expert after one number for each expert has been added to its affinities, such that tokens of the
training text, routed as in training, spread evenly. The last sees no later token. A model that keeps such
numbers itself (``--base-offset-rate``) is evaluated with its own as well.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from smlp.checkpoint.load import load_language_model
from smlp.cli.main import guarded
from smlp.cli.numbers import whole
from smlp.errors import UserError
from smlp.evaluation.scoring import block_nll
from smlp.moe.layer import TokenMoE
from smlp.moe.plan import RoutingPlan
from smlp.moe.routers import BalancedRouter, ExpertOffsets
from smlp.nn.decoder import Decoder
from smlp.nn.state import ForwardContext
from smlp.text.binarized import read_fairseq_tokens
from smlp.text.tokenizer import Vocabulary


def even_offsets(logits_NE: Tensor, steps: int = 500) -> Tensor:
    """Find a number for each expert, (E,), with which the best experts of these tokens have nearly equal loads.

    Experts with too many tokens get less, in ever smaller steps: the subgradient method for the prices of a balanced
    assignment.
    """
    num_tokens, num_experts = logits_NE.shape
    offset_E, size = torch.zeros(num_experts), float((logits_NE.amax(1) - logits_NE.amin(1)).median())
    for step in range(1, steps + 1):
        share_E = torch.bincount((logits_NE + offset_E).argmax(1), minlength=num_experts) / num_tokens
        offset_E += size / step**0.5 * (1 / num_experts - share_E)
    return offset_E


def logits_in_training(decoder: Decoder, tokens: Tensor, start_token: int = Vocabulary.eos) -> dict[str, Tensor]:
    """Return the affinities (N, E) of a stream by layer, with the tokens routed as in training."""
    found: dict[str, list[Tensor]] = {}
    hooks = [
        layer.router.register_forward_hook(
            lambda _, __, routing, name=layer.name: found.setdefault(name, []).append(routing.logits_NE)
        )
        for layer in balanced_layers(decoder)
    ]
    evaluate(decoder, tokens, True, start_token)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


def add_offsets(decoder: Decoder, tokens: Tensor, start_token: int = Vocabulary.eos) -> None:
    """Make the model's routers add offsets that are found on these tokens (N,)."""
    logits = logits_in_training(decoder, tokens, start_token)
    for layer in balanced_layers(decoder):
        found_E = even_offsets(logits[layer.name])
        layer.router.offsets = ExpertOffsets(found_E.numel(), rate=0, by_sign=False)
        layer.router.offsets.value.copy_(found_E)


def balanced_layers(decoder: Decoder) -> list[TokenMoE]:
    """Return the tMoEs whose experts BASE's router chooses."""
    layers = [module for module in decoder.modules() if isinstance(module, TokenMoE)]
    return [layer for layer in layers if isinstance(layer.router, BalancedRouter)]


def evaluate(
    decoder: Decoder, tokens: Tensor, balanced: bool, start_token: int = Vocabulary.eos
) -> tuple[float, dict[str, Tensor]]:
    """Return the perplexity per token of a stream (N,), in blocks of the context, and each expert's load by layer."""
    loads: dict[str, Tensor] = {}

    def count(context: ForwardContext) -> None:
        for layer, plan in context.plans.items():
            if isinstance(plan, RoutingPlan):
                loads[layer.name] = loads.get(layer.name, 0) + plan.counts_E

    for layer in balanced_layers(decoder):
        layer.router.training = balanced
    return math.exp(block_nll(decoder, tokens, start_token, seen=count)), loads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", required=True, help="checkpoint")
    parser.add_argument("--data", type=Path, required=True, help="binarised data")
    parser.add_argument("--subset", default="valid", help="default: %(default)s")
    parser.add_argument(
        "--train-tokens",
        **whole(),
        default=65536,
        help="tokens of train from which offsets are computed (default: %(default)s)",
    )
    options = parser.parse_args()
    model = load_language_model(options.path, options.data / "dict.txt", what="routing_report.py")
    tokens = torch.from_numpy(read_fairseq_tokens(options.data / options.subset).tokens)
    if not balanced_layers(model.decoder):
        raise UserError(f"{options.path} has no layer whose tokens BASE's router assigns")
    if any(getattr(layer.router, "warming", 0) for layer in balanced_layers(model.decoder)):
        raise UserError(f"{options.path} was saved during --base-warmup, while a table chose the experts")
    if any(layer.router.offsets is not None for layer in balanced_layers(model.decoder)):
        show("own offsets", *evaluate(model.decoder, tokens, False, model.start_token))
    for layer in balanced_layers(model.decoder):
        layer.router.offsets = None
    for name, balanced in (("greedy", False), ("balanced", True)):
        show(name, *evaluate(model.decoder, tokens, balanced, model.start_token))
    training = torch.from_numpy(read_fairseq_tokens(options.data / "train").tokens[: options.train_tokens])
    add_offsets(model.decoder, training, model.start_token)
    show("offsets", *evaluate(model.decoder, tokens, False, model.start_token))


def show(name: str, perplexity: float, loads: dict[str, Tensor]) -> None:
    """Print what :func:`evaluate` found."""
    print(f"{name}: perplexity per token {perplexity:.2f}")
    for layer, load in loads.items():
        share = load / load.sum() * 100
        print(f"  {layer}: share of the tokens of each expert (%): {' '.join(f'{value:.1f}' for value in share)}")


if __name__ == "__main__":
    sys.exit(guarded(main))
