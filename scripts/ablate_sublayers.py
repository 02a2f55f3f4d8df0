"""Measure what each part of a trained model is worth: how much worse the model predicts without it.

    python scripts/ablate_sublayers.py --path checkpoint_last.pt --data data-bin [--subset valid] [--limit-tokens 16384]

Each sublayer that is known here in turn adds nothing to its residual stream; each spatial projection (of spatial gating
units and sMoE experts) in turn has W = 0, so that no position sees another one through it. The rest of the model stays
as it was trained. A part that changes nothing has learnt nothing, or what others know as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smlp.checkpoint.load import load_language_model
from smlp.cli.main import guarded
from smlp.cli.numbers import whole
from smlp.evaluation.scoring import block_nll
from smlp.moe.feature_layer import FeatureMoE
from smlp.moe.layer import TokenMoE
from smlp.nn.attention import SelfAttention
from smlp.nn.blocks import GatedMLPBlock
from smlp.nn.decoder import Decoder
from smlp.nn.layers import FeedForward, SpatialWeights
from smlp.text.binarized import read_fairseq_tokens

#: what is added to a residual stream, and its name
SUBLAYERS: dict[type[nn.Module], str] = {
    SelfAttention: "attention",
    FeedForward: "feed-forward network",
    FeatureMoE: "sMoE",
    TokenMoE: "tMoE",
    GatedMLPBlock: "gMLP block",
}


def parts(decoder: Decoder) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield each part's block, name and module, in the order of the model."""
    for name, module in decoder.named_modules():
        block = ".".join(name.split(".")[:2])
        for kind, what in SUBLAYERS.items():
            if isinstance(module, kind):
                yield block, what, module
        if isinstance(module, SpatialWeights):
            yield block, "spatial projection", module


@contextmanager
def without(module: nn.Module) -> Iterator[None]:
    """Make the part do nothing inside this context."""
    if isinstance(module, SpatialWeights):
        kept = module.weight.detach().clone()
        with torch.no_grad():
            module.weight.zero_()
        try:
            yield
        finally:
            with torch.no_grad():
                module.weight.copy_(kept)
        return
    target = module.proj_out if isinstance(module, GatedMLPBlock) else module

    def nothing(module: nn.Module, inputs: Any, output: Any) -> Any:
        return (output[0] * 0, *output[1:]) if isinstance(output, tuple) else output * 0

    handle = target.register_forward_hook(nothing)
    try:
        yield
    finally:
        handle.remove()


def ablate(
    decoder: Decoder, tokens: torch.Tensor, start_token: int, say: Callable[[str], None]
) -> list[tuple[str, str, float]]:
    """Return rows of block, part and nats per token lost without it; the first is the model's own loss, block ''.

    Positions of a prefix, which only choose experts, do not count. Blocks without a known part are named.
    """
    intact = block_nll(decoder, tokens, start_token)
    rows = [("", "the whole model", intact)]
    say(f"{'the whole model':<40}{intact:>10.4f} nats per token")
    for block, what, module in parts(decoder):
        with without(module):
            lost = block_nll(decoder, tokens, start_token) - intact
        rows.append((block, what, lost))
        say(f"{block:<12}without {what:<20}{lost:>+10.4f}")
    seen = {block for block, *_ in rows}
    if left := [f"blocks.{number}" for number in range(len(decoder.blocks)) if f"blocks.{number}" not in seen]:
        say(f"not ablated, because their parts are unknown here: {', '.join(left)}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="ablate_sublayers.py"
    )
    parser.add_argument("--path", required=True, help="checkpoint")
    parser.add_argument("--data", type=Path, required=True, help="binary data")
    parser.add_argument("--subset", default="valid", help="default: %(default)s")
    parser.add_argument("--limit-tokens", **whole(), default=16384, help="default: %(default)s")
    options = parser.parse_args()
    model = load_language_model(options.path, options.data / "dict.txt", what="ablate_sublayers.py")
    tokens = read_fairseq_tokens(options.data / options.subset).tokens[: options.limit_tokens]
    ablate(model.decoder, torch.from_numpy(tokens), model.start_token, print)


if __name__ == "__main__":
    sys.exit(guarded(main))
