"""Show what leaky routing of features gains: perplexity on tokens that nothing can predict.

    python scripts/leak_on_noise.py [--updates 300]

Every token is drawn at random from 8, anew in every batch, so that no honest model gets below a perplexity of 8.
sMLP-leaky does, because its routing reads the tokens to be predicted (Yu et al., 2022, appendix B); without them in
sight it is worse than guessing. sMLP-partial, the same model with a router that reads the prefix only, stays at 8.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import smlp
from smlp.cli.main import guarded
from smlp.cli.numbers import whole
from smlp.evaluation.scoring import stepwise_log_probs

NUM_SYMBOLS = 8
FIRST = 4  # ids below are fairseq's special symbols
NUM_TOKENS = 8
BATCH_SIZE = 32
LEARNING_RATE = 3e-3
WARMUP = 50
SIZES = {
    "vocab_size": FIRST + NUM_SYMBOLS, "max_tokens": NUM_TOKENS, "embed_dim": 64, "ffn_dim": 128, "num_experts": 4,
    "num_dense_layers": 2, "num_sparse_layers": 2, "dropout": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """Perplexities per predicted token on fresh noise."""

    one_pass: float
    #: every position with only what stands before it in sight
    stepwise: float


def noise(num_seqs: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, (B, T) each."""
    tokens = torch.randint(FIRST, FIRST + NUM_SYMBOLS, (num_seqs, NUM_TOKENS + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train_and_score(arch: str, num_updates: int, seed: int = 1) -> Result:
    """Train on noise and score on other noise."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = smlp.build(arch, **SIZES).train()
    prefix = model.config.prefix_tokens

    def loss(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = model(source).logits[:, prefix:]
        return F.cross_entropy(logits.flatten(0, 1), target[:, prefix:].flatten())

    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98))
    for update in range(num_updates):
        decay = 0.5 * (1 + math.cos(math.pi * update / num_updates))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (update + 1) / WARMUP) * decay
        optimizer.zero_grad()
        loss(*noise(BATCH_SIZE, generator)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    source, target = noise(512, torch.Generator().manual_seed(seed + 1))
    with torch.no_grad():
        one_pass = float(loss(source, target).exp())
    stepwise = stepwise_log_probs(model, source, target, prefix)
    return Result(one_pass, math.exp(-float(stepwise.mean())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", **whole(), default=300, help="default: %(default)s")
    options = parser.parse_args()
    print("| model | perplexity in one pass | without the tokens to be predicted in sight |\n|---|---:|---:|")
    print(f"| guessing | {NUM_SYMBOLS:.2f} | {NUM_SYMBOLS:.2f} |")
    for arch in ("smlp_leaky_tiny", "smlp_partial_tiny", "smlp_tiny"):
        result = train_and_score(arch, options.updates)
        print(f"| {arch}, narrowed | {result.one_pass:.2f} | {result.stepwise:.2f} |", flush=True)


if __name__ == "__main__":
    sys.exit(guarded(main))
