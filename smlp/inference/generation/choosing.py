"""The next token of each row from its logits.

Letters: ``R`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from smlp.errors import NaNError
from smlp.inference.generation.settings import Sampling


def random_stream(seed: int, prompt: Sequence[int], draw: int) -> torch.Generator:
    """The random numbers of a prompt's draw: the same in every batch and beside any other draws."""
    key = f"{seed} {draw} {' '.join(map(str, prompt))}"
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def check_numbers(logits_RV: Tensor) -> None:
    """Refuses logits that cannot be chosen from.

    Raises:
        NaNError: some are not a number.
    """
    if logits_RV.isnan().any():
        raise NaNError("the model's next-token scores are NaN: the checkpoint has diverged or is damaged")


def penalise(logits_V: Tensor, tokens: Sequence[int], penalty: float) -> None:
    """Makes ids that occur in ``tokens`` less likely, in place: see :attr:`Sampling.repetition_penalty`."""
    seen = torch.tensor(sorted(set(tokens)), device=logits_V.device)
    before = logits_V[seen]
    logits_V[seen] = torch.where(before > 0, before / penalty, before * penalty)


def choose(logits_RV: Tensor, sampling: Sampling, streams: Sequence[torch.Generator]) -> list[int]:
    """One token for each row of (R, V); ties between likeliest tokens go to the lowest id.

    A row takes one number from its own stream, so that its token does not depend on other rows.

    Raises:
        NaNError: the logits are not numbers.
    """
    check_numbers(logits_RV)
    if sampling.temperature == 0:
        return logits_RV.argmax(dim=1).tolist()
    logits_RV = logits_RV / sampling.temperature
    if 0 < sampling.top_k < logits_RV.size(1):
        threshold_R1 = logits_RV.topk(sampling.top_k, dim=1).values[:, -1:]
        logits_RV = logits_RV.masked_fill(logits_RV < threshold_R1, -torch.inf)
    probabilities_RV = logits_RV.double().softmax(1)
    ids_RV = None
    if sampling.top_p < 1:
        probabilities_RV, ids_RV = probabilities_RV.sort(dim=1, descending=True, stable=True)
        before_RV = probabilities_RV.cumsum(1) - probabilities_RV
        probabilities_RV = probabilities_RV.masked_fill(before_RV >= sampling.top_p, 0.0)
    up_to_RV = probabilities_RV.cumsum(1)
    draws = [torch.rand(1, generator=stream, dtype=torch.float64) for stream in streams]
    # beyond the last token of any probability there is nothing to draw, whatever the sums round to
    aim_R1 = torch.stack(draws).to(up_to_RV.device) * up_to_RV[:, -1:]
    place_R1 = torch.searchsorted(up_to_RV, aim_R1, right=True)
    last_R1 = torch.searchsorted(up_to_RV, up_to_RV[:, -1:].contiguous())
    place_R1 = torch.minimum(place_R1, last_R1)
    chosen_R1 = place_R1 if ids_RV is None else ids_RV.gather(1, place_R1)
    return chosen_R1.flatten().tolist()
