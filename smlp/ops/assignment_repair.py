"""Equal loads from nearly equal ones: cheapest moves for large problems, best paths for an exact result.

:func:`move_cheapest`: the tokens that lose least move from full experts to those with free capacity.
:class:`PathRepair`: single tokens move along best paths between experts until loads are equal.

Letters: ``N`` tokens, ``E`` experts, ``K`` tokens that may have to move.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from smlp.ops.rows import occurrences

#: tokens looked at for each one that has to move, so that every full expert finds some of its own
_CANDIDATES = 4
_MORE_CANDIDATES = 64
#: at most this many repairs for each expert by augmenting paths
REPAIRS_PER_EXPERT = 8


def num_to_move(owner_N: Tensor, num_experts: int) -> int:
    """Count the tokens beyond ``ceil(N/E)`` at their experts."""
    capacity = -(-owner_N.numel() // num_experts)
    return int((occurrences(owner_N, num_experts) - capacity).clamp(min=0).sum())


def move_cheapest(worth_NE: Tensor, best_N: Tensor, owner_N: Tensor, price_E: Tensor) -> None:
    """Gives the experts loads of ``floor(N/E)`` or ``ceil(N/E)``, at little cost.

    One by one, the token that loses least moves to the expert that is best for it among those with free capacity. The
    total score stays within the sum of these losses of the best one.

    Args:
        worth_NE: what an expert is worth to a token, less its price, (N, E).
        best_N: worth of the present owner, (N,).
        owner_N: experts (N,), int64; changed in place.
        price_E: prices of the experts. Where E does not divide N, the most expensive take one token more.
    """
    num_tokens, num_experts = worth_NE.shape
    capacity_E = _capacity(price_E, num_tokens)
    while True:
        excess_E = occurrences(owner_N, num_experts) - capacity_E
        num_moves = int(excess_E.clamp(min=0).sum())
        if num_moves == 0:
            return
        candidate_K = (excess_E[owner_N] > 0).nonzero().squeeze(1)
        worth_KE = worth_NE.index_select(0, candidate_K).masked_fill_(excess_E >= 0, -torch.inf)
        wanted = _CANDIDATES * num_moves + _MORE_CANDIDATES
        if wanted < candidate_K.numel():
            loss_K = best_N[candidate_K] - worth_KE.amax(dim=1)
            chosen = loss_K.topk(wanted, largest=False).indices
            candidate_K, worth_KE = candidate_K[chosen], worth_KE[chosen]
        few = (owner_N[candidate_K], best_N[candidate_K], worth_KE, excess_E)
        moved = _by_loss(*(tensor.cpu().numpy() for tensor in few))
        owner_N[candidate_K] = torch.from_numpy(moved).to(owner_N.device)


def _capacity(price_E: Tensor, num_tokens: int) -> Tensor:
    """Return the capacity of each expert, (E,), int64."""
    num_experts = price_E.numel()
    capacity_E = torch.full_like(price_E, num_tokens // num_experts, dtype=torch.long)
    capacity_E[price_E.argsort(descending=True, stable=True)[: num_tokens % num_experts]] += 1
    return capacity_E


def _by_loss(owner_K: np.ndarray, best_K: np.ndarray, worth_KE: np.ndarray, excess_E: np.ndarray) -> np.ndarray:
    """Return the owners (K,) after the cheapest moves that there is room for."""
    owner_K, excess_E = owner_K.copy(), excess_E.copy()
    left = np.arange(owner_K.size)
    while True:
        left = left[excess_E[owner_K[left]] > 0]
        if left.size == 0:
            return owner_K
        worth = np.where(excess_E < 0, worth_KE[left], -np.inf)
        goal = worth.argmax(axis=1)
        order = np.argsort(best_K[left] - worth[np.arange(left.size), goal], kind="stable")
        left, goal = left[order], goal[order]
        source = owner_K[left]
        leaves = _place_in_queue(source) < excess_E[source]
        moves = np.flatnonzero(leaves)[_place_in_queue(goal[leaves]) < -excess_E[goal[leaves]]]
        owner_K[left[moves]] = goal[moves]
        np.subtract.at(excess_E, source[moves], 1)
        np.add.at(excess_E, goal[moves], 1)
        left = np.delete(left, moves)


def _place_in_queue(group: np.ndarray) -> np.ndarray:
    """Count the items of the same group before each item."""
    order = np.argsort(group, kind="stable")
    sorted_group = group[order]
    place = np.empty_like(order)
    place[order] = np.arange(group.size) - np.searchsorted(sorted_group, sorted_group)
    return place


class PathRepair:
    """Moves single tokens along best paths between experts until all loads are floor(N/E) or ceil(N/E).

    These are shortest paths of a minimum-cost flow, found one after the other (Dijkstra's, with prices that keep the
    lengths from being negative), so that the result is optimal unless there are too many repairs.

    Every expert has a capacity of ``ceil(N/E)``. Where E does not divide N, dummies fill the rest, at most one for
    each expert, which any expert gives and takes at no cost.

    Args:
        values_NE: what experts are worth to tokens, (N, E).
        price_E: prices of the experts. The dummies start at the cheapest.
        owner_N: experts that are best at these prices, (N,); changed in place.
        taken_off: whether the prices are already subtracted from the values.
    """

    def __init__(
        self, values_NE: np.ndarray, price_E: np.ndarray, owner_N: np.ndarray, taken_off: bool = False
    ) -> None:
        num_tokens, num_experts = values_NE.shape
        self.values_NE, self.owner_N = values_NE, owner_N
        self.capacity = -(-num_tokens // num_experts)
        num_dummies = num_experts * self.capacity - num_tokens
        # no token loses by moving to the expert that is best for it at these prices, nor does a dummy
        self.price_E = np.zeros(num_experts) if taken_off else price_E.astype(np.float64)
        self.dummy_value_E = -price_E * taken_off
        self.has_dummy_E = np.zeros(num_experts, dtype=bool)
        self.has_dummy_E[np.argsort(price_E, kind="stable")[:num_dummies]] = True
        self.excess_E = np.bincount(owner_N, minlength=num_experts) + self.has_dummy_E - self.capacity
        # gain_EE[a, b]: the largest gain of moving one token from a to b; mover_EE[a, b] is that token
        self.gain_EE = np.full((num_experts, num_experts), -np.inf)
        self.mover_EE = np.zeros((num_experts, num_experts), dtype=np.int64)

    def run(self) -> np.ndarray:
        """Return the repaired owners (N,)."""
        num_experts = self.excess_E.size
        num_repairs = int(self.excess_E.clip(min=0).sum())
        limit = REPAIRS_PER_EXPERT * num_experts
        if num_repairs > limit:
            self._shed(num_repairs - limit)
        if self.excess_E.any():
            for expert in range(num_experts):
                self._update_moves(expert)
        while self.excess_E.any():
            self._move_along(self._best_path(int(self.excess_E.argmax())))
        return self.owner_N

    def _shed(self, count: int) -> None:
        """Moves ``count`` tokens straight from experts with too many to experts with free capacity, cheapest first."""
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
            assert count < before, "an expert with too many tokens and one with free capacity always allow a move"

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

    def _best_path(self, expert: int) -> list[int]:
        """Return the path of largest total gain from an expert with too many tokens to one with free capacity."""
        length_E = np.full(self.excess_E.size, np.inf)
        length_E[expert] = 0.0
        previous_E = np.full(self.excess_E.size, -1)
        open_E = length_E.copy()  # those whose length may still shrink
        while self.excess_E[nearest := int(open_E.argmin())] >= 0:
            open_E[nearest] = np.inf
            # clipped, as rounding, and tokens that were shed, can make a step seem better than the prices allow
            step_E = self.price_E - self.price_E[nearest] - self._gains(nearest)
            through_E = length_E[nearest] + np.maximum(step_E, 0)
            shorter = through_E < length_E
            length_E[shorter] = open_E[shorter] = through_E[shorter]
            previous_E[shorter] = nearest
        self.price_E -= np.minimum(length_E, length_E[nearest])
        path = [nearest]
        while path[-1] != expert:
            path.append(int(previous_E[path[-1]]))
        return path[::-1]

    def _gains(self, expert: int) -> np.ndarray:
        """Return the largest gain of moving a token, or a dummy, from ``expert`` to every other, (E,)."""
        gain_E = self.gain_EE[expert]
        if not self.has_dummy_E[expert]:
            return gain_E
        dummy_gain_E = self.dummy_value_E - self.dummy_value_E[expert]
        return np.where(self.has_dummy_E, gain_E, np.maximum(gain_E, dummy_gain_E))

    def _move_along(self, path: list[int]) -> None:
        steps = list(pairwise(path))
        dummy_moves = [
            self.has_dummy_E[a] and not self.has_dummy_E[b] and self.gain_EE[a, b] < self._gains(a)[b] for a, b in steps
        ]
        for (source, goal), is_dummy in zip(steps, dummy_moves, strict=True):
            if is_dummy:
                self.has_dummy_E[[source, goal]] = False, True
            else:
                self.owner_N[self.mover_EE[source, goal]] = goal
        self.excess_E[path[0]] -= 1
        self.excess_E[path[-1]] += 1
        for expert in path:
            self._update_moves(expert)
