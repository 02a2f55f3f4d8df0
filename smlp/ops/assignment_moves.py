"""Equal loads from nearly equal ones: the tokens that lose least move from full experts to those with free places.

Letters: ``N`` tokens, ``E`` experts, ``K`` tokens that may have to move.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: tokens looked at for each one that has to move, so that every full expert finds some of its own
_CANDIDATES = 4
_MORE_CANDIDATES = 64


def num_to_move(owner_N: Tensor, num_experts: int) -> int:
    """Tokens beyond ``ceil(N/E)`` at their experts."""
    places = -(-owner_N.numel() // num_experts)
    return int((owner_N.bincount(minlength=num_experts) - places).clamp(min=0).sum())


def move_cheapest(worth_NE: Tensor, best_N: Tensor, owner_N: Tensor, price_E: Tensor) -> None:
    """Gives the experts loads of ``floor(N/E)`` or ``ceil(N/E)``, where that costs least.

    One by one, the token that loses least moves to the expert that is best for it among those with free places, which
    keeps the total within the sum of these losses of the best one.

    Args:
        worth_NE: what an expert is worth to a token, its price taken off, (N, E).
        best_N: worth of the present owner, (N,).
        owner_N: experts (N,), int64; changed in place.
        price_E: prices of the experts. Where E does not divide N, the dearest have a place more.
    """
    num_tokens, num_experts = worth_NE.shape
    places_E = _places(price_E, num_tokens)
    while True:
        excess_E = owner_N.bincount(minlength=num_experts) - places_E
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


def _places(price_E: Tensor, num_tokens: int) -> Tensor:
    """Places of each expert, (E,), int64."""
    num_experts = price_E.numel()
    places_E = torch.full_like(price_E, num_tokens // num_experts, dtype=torch.long)
    places_E[price_E.argsort(descending=True, stable=True)[: num_tokens % num_experts]] += 1
    return places_E


def _by_loss(owner_K: np.ndarray, best_K: np.ndarray, worth_KE: np.ndarray, excess_E: np.ndarray) -> np.ndarray:
    """Owners (K,) after the cheapest moves that there is room for."""
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
