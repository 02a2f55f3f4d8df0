"""Log-probabilities of the tokens of candidates, many groups at a time.

What the candidates of a group begin with alike is read once; then each goes on from a copy of that state
(:mod:`smlp.scoring.batching`). Padding stands on the right only.

Letters: ``G`` groups, ``R`` candidates of one pass, ``n`` tokens, ``H`` width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from smlp.context import DecodingState
from smlp.nn.decoder import Decoder
from smlp.scoring.batching import Batch, Reading, plan_batches
from smlp.scoring.texts import Candidates

#: elements of logits at a time
_LOGITS = 2**25
#: positions that take as long as what a pass costs whatever its size
_CALL_ON_CPU, _CALL_ON_GPU = 96, 4096


@dataclass(frozen=True)
class TokenScores:
    """Of the last ``s`` tokens of a text: those before them are the same for all candidates, or choose experts."""

    #: natural log-probabilities, (s,) float64
    log_probs: np.ndarray
    #: whether no token is likelier, (s,)
    is_greedy: np.ndarray


class CandidateScorer:
    """Scores groups of candidates with a decoder.

    Args:
        decoder: in evaluation mode, dropping no token, so that a score does not depend on what else is in a batch.
        share: whether to read common beginnings once; off for a model with leaky routing, whose beginnings depend on
            what follows them.
    """

    def __init__(self, decoder: Decoder, share: bool = True) -> None:
        self.decoder = decoder
        self.share = share and not decoder.config.is_leaky

    def plan(self, groups: Sequence[Candidates], batch_tokens: int) -> list[Batch]:
        """Batches in which to score the groups, see :func:`smlp.scoring.batching.plan_batches`; they do not depend
        on who is to score them."""
        call_tokens = _CALL_ON_CPU if self._device.type == "cpu" else _CALL_ON_GPU
        return plan_batches([self._reading(group) for group in groups], batch_tokens, call_tokens)

    @torch.inference_mode()
    def score(self, groups: Sequence[Candidates], batch: Batch) -> list[list[TokenScores]]:
        """Scores of every candidate of the groups of a batch, in its order.

        Positions of the model's prefix predict nothing: what comes there is left out of the scores.

        Args:
            groups: all those for which the batch was planned.
            batch: one of :meth:`plan`.
        """
        members = [groups[place] for place in batch.members]
        readings = [self._reading(group) for group in members]
        state = self._read_beginnings(readings, batch.num_shared)
        found: dict[tuple[int, int], TokenScores] = {}
        for rows in batch.passes:
            inputs = [readings[member].inputs[number][batch.num_shared :] for member, number in rows]
            own = None
            if state is not None:
                places = torch.tensor([member for member, _ in rows], device=self._device)
                own = state.select(places, capacity=batch.num_shared + max(map(len, inputs)))
            features_RnH = self.decoder.features(self._padded(inputs), own)[0]
            found.update(zip(rows, self._scores(features_RnH, members, rows, batch.num_shared), strict=True))
        return [[found[member, number] for number in range(len(group.texts))] for member, group in enumerate(members)]

    def _reading(self, group: Candidates) -> Reading:
        return Reading.of(group, self.share)

    def _read_beginnings(self, readings: Sequence[Reading], num_shared: int) -> DecodingState | None:
        """The state after the first inputs of every group; None if there are none."""
        if not num_shared:
            return None
        state = DecodingState(capacity=num_shared)
        beginnings_Gn = torch.tensor([reading.inputs[0][:num_shared] for reading in readings], device=self._device)
        self.decoder.read(beginnings_Gn, state)
        return state

    def _scores(
        self, features_RnH: Tensor, groups: Sequence[Candidates], rows: Sequence[tuple[int, int]], num_shared: int
    ) -> Iterator[TokenScores]:
        """Scores of the candidates whose features are given from position ``num_shared`` on."""
        prefix_tokens = self.decoder.config.prefix_tokens
        places, targets, sizes = [], [], []
        for row, (member, number) in enumerate(rows):
            group = groups[member]
            tokens = group.texts[number].tokens
            first = min(max(group.first, prefix_tokens - group.num_filled), len(tokens))
            begin = group.num_filled + first - num_shared
            places += [(row, position) for position in range(begin, begin + len(tokens) - first)]
            targets += tokens[first:]
            sizes.append(len(tokens) - first)
        log_probs, is_greedy = self._predict(features_RnH, places, targets)
        ends = np.cumsum(sizes)[:-1]
        return map(TokenScores, np.split(log_probs, ends), np.split(is_greedy, ends))

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
            is_greedy.append((chosen_N == logits_NV.amax(dim=1)).cpu())
            log_probs.append(-F.cross_entropy(logits_NV, part_N, reduction="none").double().cpu())
        return torch.cat(log_probs).numpy(), torch.cat(is_greedy).numpy()

    @property
    def _device(self) -> torch.device:
        return self.decoder.embedding.weight.device
