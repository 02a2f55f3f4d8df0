"""Logits only where a target is to be scored, and only so many at a time.

Letters: ``K`` scored positions, ``R`` of them at a time, ``H`` features, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from smlp.nn.decoder import Decoder

# logits in memory at a time: 128 MiB in float32
_MOST_LOGITS = 2**25


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


def scored(logits_RV: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
    """Natural log-probability of each target, (R,), and whether no token is likelier, (R,).

    The logits are used up: overwritten, because at a large vocabulary a second tensor of their size costs more than the
    arithmetic.
    """
    chosen_R = logits_RV.gather(1, targets_R.unsqueeze(1)).squeeze(1)
    largest_R = logits_RV.amax(dim=1)
    sum_R = logits_RV.sub_(largest_R.unsqueeze(1)).exp_().sum(dim=1)
    return chosen_R - largest_R - sum_R.log(), chosen_R == largest_R
