"""Logits only where a target is to be scored, and only so many at a time.

Letters: ``K`` scored positions, ``R`` of them at a time, ``H`` features, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from smlp.nn.decoder import Decoder

# logits in memory at a time: 64 MiB in float32
_MOST_LOGITS = 2**24


def logits_in_pieces(decoder: Decoder, x_KH: Tensor, targets_K: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits (R, V) in float32 and their targets (R,), in order; nothing for K = 0.

    Args:
        decoder: with the output matrix.
        x_KH: final hidden states.
        targets_K: ids.
    """
    if not targets_K.numel():
        return
    num_rows = max(1, _MOST_LOGITS // decoder.config.vocab_size)
    for x_RH, targets_R in zip(x_KH.split(num_rows), targets_K.split(num_rows), strict=True):
        yield decoder.project(x_RH).float(), targets_R


def target_log_probs(logits_RV: Tensor, targets_R: Tensor) -> Tensor:
    """Natural log-probability of each target, (R,)."""
    return -F.cross_entropy(logits_RV, targets_R, reduction="none")
