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
_EPSILON = 1e-9


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
        # the gain of moving a dummy from one expert to another
        self.dummy_gain_EE = (price_E[:, None] - price_E) * taken_off
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
        for _ in range(2 * limit):
            if not self.excess_E.any():
                return self.owner_N
            self._move_along(self._best_path())
        self._shed(int(self.excess_E.clip(min=0).sum()))
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

    def _best_path(self) -> list[int]:
        """Return the path of largest total gain from an expert with too many tokens to one with free capacity."""
        num_experts = self.excess_E.size
        gain_EE = np.where(
            self.has_dummy_E[:, None] & ~self.has_dummy_E,
            np.maximum(self.gain_EE, self.dummy_gain_EE),
            self.gain_EE,
        )
        won_E = np.where(self.excess_E > 0, 0.0, -np.inf)
        previous_E = np.full(num_experts, -1)
        changed = np.flatnonzero(self.excess_E > 0)
        for _ in range(num_experts - 1):  # Bellman-Ford, from the experts to which a better path was found
            through = won_E[changed, None] + gain_EE[changed]
            source_E = through.argmax(axis=0)
            candidate_E = through[source_E, np.arange(num_experts)]
            better_E = candidate_E > won_E + _EPSILON
            if not better_E.any():
                break
            won_E = np.where(better_E, candidate_E, won_E)
            previous_E = np.where(better_E, changed[source_E], previous_E)
            changed = np.flatnonzero(better_E)
        path = [int(np.where(self.excess_E < 0, won_E, -np.inf).argmax())]
        while previous_E[path[-1]] >= 0:
            path.append(int(previous_E[path[-1]]))
            if path[-1] in path[:-1]:  # a cycle with a gain: only after tokens were shed; follow it alone
                return path[path.index(path[-1]) :][::-1]
        return path[::-1]

    def _move_along(self, path: list[int]) -> None:
        steps = list(pairwise(path))
        dummy_moves = [
            self.has_dummy_E[a] and not self.has_dummy_E[b] and self.gain_EE[a, b] < self.dummy_gain_EE[a, b]
            for a, b in steps
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
