"""Measure on which tokens one model predicts better than another: those that repeat their context, or others.

    python scripts/compare_tokens.py gmlp/checkpoint_last.pt transformer/checkpoint_last.pt --data data-bin

The tokens of a subset fall into five groups. The two that repeat their context follow the same tokens as before: the
last tokens of the context stand earlier in it, too, and the last time they did, this token came next. The third has
all others that follow at least three tokens that stand earlier in the context, the fourth those that occur in it at
all, and the fifth those that are new to it. The context is what the model sees: at most T tokens, in blocks, as
``smlp eval-lm`` gives by default.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from smlp.checkpoint.load import load_language_model
from smlp.cli.main import guarded
from smlp.errors import UserError
from smlp.evaluation.samples import Cutting, Samples, cut
from smlp.evaluation.scoring import score_samples
from smlp.experiments.report.table import markdown_line
from smlp.text.binarized import read_fairseq_tokens

LONG = 3  # tokens before that must agree, for the first group
GROUPS = (
    f"as before, after {LONG} tokens or more",
    f"as before, after fewer than {LONG}",
    f"otherwise, after {LONG} tokens or more",
    "other, in the context",
    "other, new to the context",
)


def groups_of(source_n: np.ndarray, target_n: np.ndarray) -> np.ndarray:
    """Return the number of each token's group in ``GROUPS``, (n,).

    Args:
        source_n: what a model is given, (n,): position i sees the ids up to ``source_n[i]``.
        target_n: the ids that are predicted, (n,).
    """
    size = len(source_n)
    padded = np.concatenate([np.full(LONG - 1, -1), source_n])  # -1 agrees with no token
    ends_nk = sliding_window_view(padded, LONG)[:, ::-1]  # the last tokens up to a position, the latest first
    agree_nnk = (ends_nk[:, None] == ends_nk[None]) & (ends_nk[:, None] >= 0)
    length_nn = np.logical_and.accumulate(agree_nnk, axis=2).sum(axis=2) * np.tri(size, k=-1, dtype=np.int64)
    length_n = length_nn.max(axis=1)
    latest_n = size - 1 - (length_nn == length_n[:, None])[:, ::-1].argmax(axis=1)
    after_n = source_n[np.minimum(latest_n + 1, size - 1)]
    repeats_n, long_n = (length_n > 0) & (after_n == target_n), length_n == LONG
    known_n = ((source_n[None] == target_n[:, None]) & np.tri(size, dtype=bool)).any(axis=1)
    return np.select([repeats_n & long_n, repeats_n, long_n, known_n], [0, 1, 2, 3], default=4)


def groups_in(samples: Samples, num_tokens: int) -> np.ndarray:
    """Return the number of the group of each token of a stream, (N,)."""
    found_N = np.empty(num_tokens, dtype=np.int64)
    for first, end in zip(samples.first_S, samples.end_S, strict=True):
        block = slice(first, end)
        found_N[samples.places_M[block]] = groups_of(samples.sources_M[block], samples.targets_M[block])
    return found_N


def compare(losses: Sequence[np.ndarray], group_N: np.ndarray) -> list[str]:
    """Return the lines of a Markdown table: nats per token in each group, and each model's part of the difference.

    Args:
        losses: nats of each token, (N,), for each model; the others are compared with the first.
        group_N: the number of each token's group.
    """
    others = range(2, len(losses) + 1)
    heads = [*(f"model {n}" for n in range(1, len(losses) + 1)), *(f"{n} less 1, of all tokens" for n in others)]
    lines = [f"| tokens | share | {' | '.join(heads)} |", f"|---|---:|{'---:|' * len(heads)}"]
    everything = ("all", np.ones(len(group_N), dtype=bool))
    for name, chosen_N in [*((name, group_N == n) for n, name in enumerate(GROUPS)), everything]:
        if not chosen_N.any():
            continue
        means = [f"{loss_N[chosen_N].mean():.3f}" for loss_N in losses]
        parts = [f"{(loss_N - losses[0])[chosen_N].sum() / len(group_N):+.4f}" for loss_N in losses[1:]]
        lines.append(markdown_line([name, f"{chosen_N.mean():.1%}", *means, *parts]))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="compare_tokens.py"
    )
    parser.add_argument(
        "paths", nargs="+", metavar="CHECKPOINT", help="checkpoints with the same context and vocabulary"
    )
    parser.add_argument("--data", type=Path, required=True, help="binary data")
    parser.add_argument("--subset", default="test", help="default: %(default)s")
    options = parser.parse_args()
    tokens_N = read_fairseq_tokens(options.data / options.subset).tokens
    words = {"dictionary": options.data / "dict.txt", "what": "compare_tokens.py"}
    models = [load_language_model(path, **words) for path in options.paths]
    decoders, start = [model.decoder for model in models], models[0].start_token
    if any(model.start_token != start for model in models):
        raise UserError("some of the models were trained with --add-bos-token, and others without: their blocks differ")
    widths = [decoder.config.max_tokens for decoder in decoders]
    for path, width in zip(options.paths, widths, strict=True):
        if width != widths[0]:
            raise UserError(f"{path} has a context of {width} tokens, {options.paths[0]} one of {widths[0]}")
    prefix = max(decoder.config.prefix_tokens for decoder in decoders)
    cutting = replace(Cutting.in_blocks(decoders[0].config, start), prefix=prefix)
    samples = cut(tokens_N, np.array([len(tokens_N)]), cutting)
    if not samples.num_scored:
        raise UserError(f"all {len(tokens_N)} tokens lie in the prefix of {prefix} positions")
    losses, batches = [], samples.batches(16)
    for decoder in decoders:
        losses.append(-score_samples(decoder, samples, batches, len(tokens_N)).log_probs_N.astype(np.float64))
    scored_N = ~np.isnan(losses[0])
    for number, path in enumerate(options.paths, start=1):
        print(f"model {number}: {path}")
    print(*compare([loss_N[scored_N] for loss_N in losses], groups_in(samples, len(tokens_N))[scored_N]), sep="\n")


if __name__ == "__main__":
    sys.exit(guarded(main))
