"""Log-probabilities of the tokens of candidates, many groups at a time.

What the candidates of a group begin with alike is read once; then each goes on from a copy of that state
(:mod:`smlp.scoring.batching`). Padding stands on the right only.

Letters: ``G`` groups, ``R`` candidates of one pass (in ``_predict``: scored positions at a time),
``n`` tokens, ``K`` scored positions, ``H`` width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from smlp.context import DecodingState
from smlp.errors import UserError
from smlp.nn.decoder import Decoder
from smlp.scoring.batching import Batch, Reading, plan_batches
from smlp.scoring.targets import logits_in_pieces, target_log_probs
from smlp.scoring.texts import Candidates

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

    def each(
        self, groups: Sequence[Candidates], batch_tokens: int, rank: int = 0, num_ranks: int = 1
    ) -> Iterator[tuple[int, list[TokenScores]]]:
        """Place and scores of every group, batch by batch; of every ``num_ranks``-th batch only, from ``rank`` on.

        Raises:
            UserError: a batch does not fit into memory.
        """
        for batch in self.plan(groups, batch_tokens)[rank::num_ranks]:
            try:
                scored = self.score(groups, batch)
            except torch.OutOfMemoryError:
                raise UserError(
                    f"a batch of {len(batch.members)} examples does not fit into memory: lower --batch-tokens "
                    f"(now {batch_tokens})"
                ) from None
            yield from zip(batch.members, scored, strict=True)

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
        row_K, position_K = torch.tensor(places, dtype=torch.int64, device=self._device).view(-1, 2).unbind(1)
        targets_K = torch.tensor(targets, dtype=torch.int64, device=self._device)
        log_probs, is_greedy = [torch.zeros(0)], [torch.zeros(0, dtype=torch.bool)]
        for logits_RV, targets_R in logits_in_pieces(self.decoder, features_RnH[row_K, position_K], targets_K):
            chosen_R = logits_RV.gather(1, targets_R.unsqueeze(1)).squeeze(1)
            is_greedy.append((chosen_R == logits_RV.amax(dim=1)).cpu())
            log_probs.append(target_log_probs(logits_RV, targets_R).cpu())
        return torch.cat(log_probs).double().numpy(), torch.cat(is_greedy).numpy()

    @property
    def _device(self) -> torch.device:
        return self.decoder.embedding.weight.device
