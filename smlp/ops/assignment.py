"""Balanced assignment of tokens to experts: prices by Sinkhorn iterations, then exact repair by augmenting paths.

Letters: ``N`` tokens, ``E`` experts.

BASE (Lewis et al., 2021, section 3.1) maximises the total score under equal loads. At prices ``p`` every token takes
the expert that maximises ``score - p``: that is optimal among all assignments with the same loads. Prices from a few
Sinkhorn iterations give loads that are nearly equal. The rest is repaired one token at a time along the best path in
the graph of experts, which keeps the assignment optimal for its loads, so that the end is the optimum (of scores that
differ from the given ones by at most ``TIE_NOISE`` of their usual spread, which is what breaks ties). The number of
repairs is bounded; beyond it tokens take the best free place, so that time is bounded for any input.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

#: ties are broken by fixed noise of this share of the scores' spread (the median token's largest minus smallest)
TIE_NOISE = 1e-3
#: temperatures of the Sinkhorn iterations, as shares of the spread, and iterations at each
TEMPERATURES = (0.2, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005)
ITERATIONS = 3
#: at most this many repairs for each expert by augmenting paths
REPAIRS_PER_EXPERT = 8
_EPSILON = 1e-9


def balanced_assignment(scores: Tensor) -> Tensor:
    """Assigns each token to one expert, with loads that differ by at most one, for a nearly maximal total score.

    Args:
        scores: affinities (N, E), any real dtype and any N >= 0, E >= 1. An infinite entry counts as one well
            beyond the finite ones.

    Returns:
        The expert of each token, (N,), int64: each expert occurs ``floor(N/E)`` or ``ceil(N/E)`` times. The same
        scores always give the same result on the same device.

    Raises:
        ValueError: ``scores`` is not a matrix with at least one column.
        FloatingPointError: a score is NaN.
    """
    if scores.dim() != 2 or scores.size(1) == 0:
        raise ValueError(f"scores must have shape (N, E) with E >= 1, got {tuple(scores.shape)}")
    return balanced_assignments(scores.unsqueeze(0))[0]


def balanced_assignments(scores: Tensor) -> Tensor:
    """:func:`balanced_assignment` of several problems of one size, each by itself, in one go.

    Args:
        scores: affinities (B, N, E).

    Returns:
        Experts (B, N), int64.

    Raises:
        FloatingPointError: a score is NaN.
    """
    num_problems, num_tokens, num_experts = scores.shape
    check_no_nan(scores.flatten(0, 1))
    if num_problems == 0 or num_tokens == 0 or num_experts == 1:
        return torch.zeros(num_problems, num_tokens, dtype=torch.long, device=scores.device)
    values_BNE = torch.stack([_normalised(problem) for problem in scores.detach()])
    noise_generator = torch.Generator().manual_seed(num_tokens * 1_000_003 + num_experts)
    noise_NE = torch.rand(num_tokens, num_experts, generator=noise_generator, dtype=values_BNE.dtype)
    values_BNE = values_BNE.add(noise_NE.to(values_BNE.device), alpha=TIE_NOISE)
    price_BE = _sinkhorn_prices(values_BNE)
    owner_BN = (values_BNE - price_BE.unsqueeze(1)).argmax(dim=2)
    problems = zip(*(tensor.cpu().numpy() for tensor in (values_BNE, price_BE, owner_BN)), strict=True)
    repaired = [torch.from_numpy(_Repair(*problem).run()) for problem in problems]
    return torch.stack(repaired).to(scores.device)


def check_no_nan(scores: Tensor) -> None:
    """Raises FloatingPointError, with the number of bad tokens, if any score (N, E) is NaN."""
    bad = scores.isnan().any(dim=1)
    if bad.any():
        raise FloatingPointError(f"{int(bad.sum())} of {scores.size(0)} tokens have NaN routing scores")


def _normalised(scores: Tensor) -> Tensor:
    """Scores in at least float32 on a scale at which a token's largest and smallest differ by about 1, if any differ.

    A constant added to all scores of a token has no influence on the assignment; it is taken away, so that a large one
    cannot hide what the experts are worth. The unit is the median token's spread, which single outliers do not move.
    """
    values = scores.to(torch.promote_types(scores.dtype, torch.float32)) / 8  # room for sums below
    finite = values.isfinite()
    if not finite.all():
        low, high = values[finite].aminmax() if finite.any() else (values.new_zeros(()), values.new_zeros(()))
        beyond = torch.where(high > low, high - low, 1.0)
        values = values.clamp(low - beyond, high + beyond)
    values = values - values.amax(dim=1, keepdim=True)
    spread_N = -values.amin(dim=1)
    spreads = spread_N[spread_N > 0]
    return values / spreads.median() if spreads.numel() else values


def _sinkhorn_prices(values_BNE: Tensor) -> Tensor:
    """Prices (B, E) at which softly assigned tokens load the experts equally (Sinkhorn's iterations in log space)."""
    num_problems, num_tokens, num_experts = values_BNE.shape
    log_load = float(np.log(num_tokens / num_experts))
    price_BE = values_BNE.new_zeros(num_problems, num_experts)
    for temperature in TEMPERATURES:
        for _ in range(ITERATIONS):
            log_share_BNE = torch.log_softmax((values_BNE - price_BE.unsqueeze(1)) / temperature, dim=2)
            price_BE = price_BE + temperature * (log_share_BNE.logsumexp(dim=1) - log_load)
    return price_BE


class _Repair:
    """Moves single tokens along best paths between experts until all loads are floor(N/E) or ceil(N/E).

    Every expert has ``ceil(N/E)`` places. Where E does not divide N, the spare places hold dummies, at most one for
    each expert, which any expert gives and takes at no cost.
    """

    def __init__(self, values_NE: np.ndarray, price_E: np.ndarray, owner_N: np.ndarray) -> None:
        num_tokens, num_experts = values_NE.shape
        self.values_NE, self.owner_N = values_NE, owner_N
        self.places = -(-num_tokens // num_experts)
        num_dummies = num_experts * self.places - num_tokens
        self.has_dummy_E = np.zeros(num_experts, dtype=bool)
        self.has_dummy_E[np.argsort(price_E, kind="stable")[:num_dummies]] = True
        self.excess_E = np.bincount(owner_N, minlength=num_experts) + self.has_dummy_E - self.places
        # gain_EE[a, b]: the most that is won by moving one token from a to b; mover_EE[a, b] is that token
        self.gain_EE = np.full((num_experts, num_experts), -np.inf)
        self.mover_EE = np.zeros((num_experts, num_experts), dtype=np.int64)

    def run(self) -> np.ndarray:
        """The repaired owners (N,)."""
        num_experts = self.excess_E.size
        num_repairs = int(self.excess_E.clip(min=0).sum())
        limit = REPAIRS_PER_EXPERT * num_experts
        if num_repairs > limit:
            self._shed(num_repairs - limit)
        if self.excess_E.any():
            for expert in range(num_experts):
                self._update_moves(expert)
        for _ in range(2 * limit):
            if not self.excess_E.any():
                return self.owner_N
            self._move_along(self._best_path())
        self._shed(int(self.excess_E.clip(min=0).sum()))
        return self.owner_N

    def _shed(self, count: int) -> None:
        """Moves ``count`` tokens straight from experts with too many to experts with free places, cheapest first."""
        while count > 0:
            tokens = np.flatnonzero(self.excess_E[self.owner_N] > 0)
            open_experts = np.flatnonzero(self.excess_E < 0)
            alternatives = self.values_NE[np.ix_(tokens, open_experts)]
            target = open_experts[alternatives.argmax(axis=1)]
            loss = self.values_NE[tokens, self.owner_N[tokens]] - alternatives.max(axis=1)
            before = count
            for position in np.argsort(loss, kind="stable"):
                token, source, goal = tokens[position], self.owner_N[tokens[position]], target[position]
                if count > 0 and self.excess_E[source] > 0 and self.excess_E[goal] < 0:
                    self.owner_N[token] = goal
                    self.excess_E[source] -= 1
                    self.excess_E[goal] += 1
                    count -= 1
            assert count < before, "an expert with too many tokens and one with a free place always allow a move"

    def _update_moves(self, expert: int) -> None:
        """Recomputes the best move from ``expert`` to every other."""
        tokens = np.flatnonzero(self.owner_N == expert)
        if tokens.size == 0:
            self.gain_EE[expert] = -np.inf
        else:
            gains = self.values_NE[tokens] - self.values_NE[tokens, expert, None]
            best = gains.argmax(axis=0)
            self.gain_EE[expert] = gains[best, np.arange(best.size)]
            self.mover_EE[expert] = tokens[best]
        self.gain_EE[expert, expert] = -np.inf

    def _best_path(self) -> list[int]:
        """Experts from one with too many tokens to one with a free place, along the moves that win most in all."""
        num_experts = self.excess_E.size
        gain_EE = np.where(
            self.has_dummy_E[:, None] & ~self.has_dummy_E[None, :], np.maximum(self.gain_EE, 0.0), self.gain_EE
        )
        won_E = np.where(self.excess_E > 0, 0.0, -np.inf)
        previous_E = np.full(num_experts, -1)
        for _ in range(num_experts - 1):  # Bellman-Ford
            through_EE = won_E[:, None] + gain_EE
            source_E = through_EE.argmax(axis=0)
            candidate_E = through_EE[source_E, np.arange(num_experts)]
            better_E = candidate_E > won_E + _EPSILON
            if not better_E.any():
                break
            won_E = np.where(better_E, candidate_E, won_E)
            previous_E = np.where(better_E, source_E, previous_E)
        path = [int(np.where(self.excess_E < 0, won_E, -np.inf).argmax())]
        while previous_E[path[-1]] >= 0:
            path.append(int(previous_E[path[-1]]))
            if path[-1] in path[:-1]:  # a cycle that wins: only after tokens were shed; follow it alone
                return path[path.index(path[-1]) :][::-1]
        return path[::-1]

    def _move_along(self, path: list[int]) -> None:
        steps = list(pairwise(path))
        dummy_moves = [self.has_dummy_E[a] and not self.has_dummy_E[b] and self.gain_EE[a, b] < 0 for a, b in steps]
        for (source, goal), is_dummy in zip(steps, dummy_moves, strict=True):
            if is_dummy:
                self.has_dummy_E[[source, goal]] = False, True
            else:
                self.owner_N[self.mover_EE[source, goal]] = goal
        self.excess_E[path[0]] -= 1
        self.excess_E[path[-1]] += 1
        for expert in path:
            self._update_moves(expert)
