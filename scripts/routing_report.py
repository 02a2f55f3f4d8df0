"""How much is lost because evaluation routes greedily, and how evenly the experts are used then.

    python scripts/routing_report.py --path checkpoint_best.pt --data data-bin [--subset valid]

Evaluates a checkpoint twice on the same blocks: with each token's best expert (as in all evaluation), and with balanced
assignment over batches (as in training; it sees later tokens, so it is a diagnosis, not a result).
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch

import smlp
from smlp.context import ForwardContext
from smlp.errors import UserError
from smlp.evaluation.binarized import read_fairseq_tokens
from smlp.evaluation.blocks import block_log_probs
from smlp.moe.plan import RoutingPlan
from smlp.moe.routers import BalancedRouter
from smlp.nn.decoder import Decoder


def evaluate(decoder: Decoder, tokens: torch.Tensor, balanced: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Perplexity per token of a stream (N,), in blocks of T, and the load of each expert by layer."""
    loads: dict[str, torch.Tensor] = {}

    def count(context: ForwardContext) -> None:
        for layer, plan in context.plans.items():
            if isinstance(plan, RoutingPlan):
                loads[layer.name] = loads.get(layer.name, 0) + plan.counts_E

    for module in decoder.modules():
        if isinstance(module, BalancedRouter):
            module.training = balanced
    log_probs = block_log_probs(decoder, tokens, seen=count)
    return math.exp(-float(log_probs.double().mean())), loads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", required=True, help="checkpoint")
    parser.add_argument("--data", type=Path, required=True, help="binarised data")
    parser.add_argument("--subset", default="valid", help="default: %(default)s")
    options = parser.parse_args()
    model = smlp.load_pretrained(options.path, options.data / "dict.txt")
    tokens = torch.from_numpy(read_fairseq_tokens(options.data / options.subset).tokens)
    for name, balanced in (("greedy", False), ("balanced", True)):
        perplexity, loads = evaluate(model.decoder, tokens, balanced)
        print(f"{name}: perplexity per token {perplexity:.2f}")
        for layer, load in sorted(loads.items()):
            share = load / load.sum() * 100
            print(f"  {layer}: share of the tokens of each expert (%): {' '.join(f'{value:.1f}' for value in share)}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"smlp: error: {error}")
