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
import torch.nn.functional as F

import smlp
from smlp.context import ForwardContext
from smlp.errors import UserError
from smlp.evaluation.binarized import read_fairseq_tokens
from smlp.moe.routers import BalancedRouter
from smlp.nn.decoder import Decoder

BATCH_SIZE = 16


@torch.no_grad()
def evaluate(
    decoder: Decoder, tokens: torch.Tensor, start: int, balanced: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """Perplexity per token of a stream (N,), in blocks of T, and the load of each expert by layer."""
    for module in decoder.modules():
        if isinstance(module, BalancedRouter):
            module.training = balanced
    width = decoder.config.max_tokens
    inputs = torch.cat([torch.tensor([start]), tokens[:-1]])
    total, loads = 0.0, {}
    for begin in range(0, len(tokens), width * BATCH_SIZE):
        end = min(begin + width * BATCH_SIZE, len(tokens))
        whole = (end - begin) // width * width
        for first, last, rows in ((begin, begin + whole, -1), (begin + whole, end, 1)):
            if first == last:
                continue
            context = ForwardContext()
            block = inputs[first:last].view(rows, width if rows == -1 else last - first)
            logits = decoder(block, context=context).logits.flatten(0, 1)
            total += float(F.cross_entropy(logits, tokens[first:last], reduction="sum"))
            for layer, plan in context.plans.items():
                loads[layer.name] = loads.get(layer.name, 0) + plan.counts_E
    return math.exp(total / len(tokens)), loads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", required=True, help="checkpoint")
    parser.add_argument("--data", type=Path, required=True, help="binarised data")
    parser.add_argument("--subset", default="valid", help="default: %(default)s")
    options = parser.parse_args()
    model = smlp.load_pretrained(options.path, options.data / "dict.txt")
    tokens = torch.from_numpy(read_fairseq_tokens(options.data / options.subset).tokens)
    for name, balanced in (("greedy", False), ("balanced", True)):
        perplexity, loads = evaluate(model.decoder, tokens, model.vocabulary.eos, balanced)
        print(f"{name}: perplexity per token {perplexity:.2f}")
        for layer, load in sorted(loads.items()):
            share = load / load.sum() * 100
            print(f"  {layer}: share of the tokens of each expert (%): {' '.join(f'{value:.1f}' for value in share)}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"smlp: error: {error}")
