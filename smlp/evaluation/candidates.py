"""Log-probabilities of the tokens of candidates, many groups at a time.

What the candidates of a group begin with alike is read once, by all groups of a batch together as far as the shortest
beginning goes; then the candidates go on from copies of that state. Padding stands on the right only.

Letters: ``G`` groups, ``R`` candidates of all groups, ``n`` tokens, ``H`` width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from smlp.context import DecodingState
from smlp.evaluation.texts import Candidates
from smlp.nn.decoder import Decoder

#: elements of logits at a time
_LOGITS = 2**25


@dataclass(frozen=True)
class TokenScores:
    """Of the last ``s`` tokens of a text: those before them are the same for all candidates, or choose experts."""

    #: natural log-probabilities, (s,) float64
    log_probs: np.ndarray
    #: whether each of them is the likeliest token, (s,)
    is_greedy: np.ndarray


@dataclass(frozen=True)
class Reading:
    """How a group goes through a model: inputs of every candidate, of which the first ``num_shared`` are alike."""

    #: ids, start symbols first and the last token left out
    inputs: tuple[tuple[int, ...], ...]
    num_shared: int

    @classmethod
    def of(cls, group: Candidates, start_token: int) -> Reading:
        """The first scored token is predicted from the last start symbol or the token before it, which is not shared,
        so that everything that is scored comes out of the second pass."""
        lead = (start_token,) * (group.num_filled + 1)
        return cls(tuple(lead + text.tokens[:-1] for text in group.texts), len(lead) - 1 + group.first)

    @property
    def longest(self) -> int:
        """Inputs of the longest candidate."""
        return max(map(len, self.inputs))


def plan_batches(readings: Sequence[Reading], batch_tokens: int, share: bool = True) -> list[list[int]]:
    """Which groups to read together, as places in the list: those of like length, the longest first, so that memory
    runs out at once if it does.

    Args:
        readings: of all groups.
        batch_tokens: positions that a batch may take up, padding included; a group that takes more is on its own.
        share: whether common beginnings are read once.
    """
    shared = [reading.num_shared if share else 0 for reading in readings]
    order = sorted(range(len(readings)), key=lambda place: (-shared[place], -readings[place].longest, place))
    batches: list[list[int]] = []
    for place in order:
        grown = [*(batches[-1] if batches else ()), place]
        if len(grown) > 1 and _positions([readings[one] for one in grown], share) <= batch_tokens:
            batches[-1] = grown
        else:
            batches.append([place])
    return batches


def _positions(readings: Sequence[Reading], share: bool) -> int:
    common = min(reading.num_shared for reading in readings) if share else 0
    rest = max(reading.longest for reading in readings) - common
    return len(readings) * common + sum(len(reading.inputs) for reading in readings) * rest


class CandidateScorer:
    """Scores groups of candidates with a decoder.

    Args:
        decoder: in evaluation mode, dropping no token, so that a score does not depend on what else is in a batch.
        start_token: id before every text.
        share: whether to read common beginnings once; off for a model with leaky routing, whose beginnings depend on
            what follows them.
    """

    def __init__(self, decoder: Decoder, start_token: int, share: bool = True) -> None:
        self.decoder = decoder
        self.start_token = start_token
        self.share = share and not decoder.config.is_leaky

    def plan(self, groups: Sequence[Candidates], batch_tokens: int) -> list[list[int]]:
        """Batches in which to score the groups; see :func:`plan_batches`."""
        return plan_batches([Reading.of(group, self.start_token) for group in groups], batch_tokens, self.share)

    @torch.inference_mode()
    def score(self, groups: Sequence[Candidates]) -> list[list[TokenScores]]:
        """Scores of every candidate of every group, in one batch.

        Positions of the model's prefix predict nothing: what comes there is left out of the scores.
        """
        readings = [Reading.of(group, self.start_token) for group in groups]
        common = min(reading.num_shared for reading in readings) if self.share else 0
        state = self._read_beginnings(readings, common) if common else None
        rows = [inputs[common:] for reading in readings for inputs in reading.inputs]
        features_RnH = self.decoder.features(self._padded(rows), state)[0]
        prefix = self.decoder.config.prefix_tokens
        places, targets, sizes = [], [], []
        for group in groups:
            for text in group.texts:
                row = len(sizes)
                first = max(group.first, min(prefix - group.num_filled, len(text.tokens)))
                begin = group.num_filled + first - common
                size = len(text.tokens) - first
                places += [(row, begin + step) for step in range(size)]
                targets += text.tokens[first:]
                sizes.append(size)
        log_probs, is_greedy = self._predict(features_RnH, places, targets)
        scores = map(TokenScores, _split(log_probs, sizes), _split(is_greedy, sizes))
        return [[next(scores) for _ in group.texts] for group in groups]

    def _read_beginnings(self, readings: Sequence[Reading], common: int) -> DecodingState:
        """The state after the first ``common`` inputs of every group, once for each of its candidates."""
        longest = max(reading.longest for reading in readings)
        state = DecodingState(capacity=longest)
        beginnings_Gn = torch.tensor([reading.inputs[0][:common] for reading in readings], device=self._device)
        self.decoder.features(beginnings_Gn, state)
        counts = torch.tensor([len(reading.inputs) for reading in readings])
        state.reorder(torch.arange(len(readings)).repeat_interleave(counts).to(self._device))
        return state

    def _padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        width = max(map(len, rows))
        padding = [self.decoder.config.padding_idx] * width
        return torch.tensor([[*row, *padding[len(row) :]] for row in rows], device=self._device)

    def _predict(
        self, features_RnH: Tensor, places: Sequence[tuple[int, int]], targets: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of targets at places (row, position), and whether each target is the likeliest one."""
        if not places:
            return np.zeros(0), np.zeros(0, dtype=bool)
        row, position = torch.tensor(places, device=self._device).unbind(1)
        features_NH = features_RnH[row, position]
        target_N = torch.tensor(targets, device=self._device)
        log_probs, is_greedy = [], []
        size = max(1, _LOGITS // self.decoder.config.vocab_size)
        for part_NH, part_N in zip(features_NH.split(size), target_N.split(size), strict=True):
            logits_NV = self.decoder.project(part_NH).float()
            chosen_N = logits_NV.gather(1, part_N.unsqueeze(1)).squeeze(1)
            log_probs.append((chosen_N - logits_NV.logsumexp(dim=1)).double().cpu())
            is_greedy.append((logits_NV.argmax(dim=1) == part_N).cpu())
        return torch.cat(log_probs).numpy(), torch.cat(is_greedy).numpy()

    @property
    def _device(self) -> torch.device:
        return self.decoder.embedding.weight.device


def _split(values: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(sizes)[:-1])
