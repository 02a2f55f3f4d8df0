"""Equal loads from nearly equal ones: the tokens that lose least move from full experts to those with free places.

Letters: ``B`` problems, ``N`` tokens, ``E`` experts, ``K`` tokens that may have to move.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: tokens looked at for each one that has to move, so that every full expert finds some of its own
_CANDIDATES = 4
_MORE_CANDIDATES = 64


def num_to_move(owner_BN: Tensor, num_experts: int) -> Tensor:
    """Tokens beyond ``ceil(N/E)`` at their experts, (B,)."""
    return (_counts(owner_BN, num_experts) + (-owner_BN.size(1) // num_experts)).clamp(min=0).sum(dim=1)


def move_cheapest(worth_BNE: Tensor, best_BN: Tensor, owner_BN: Tensor, price_BE: Tensor) -> Tensor:
    """Owners under loads of ``floor(N/E)`` or ``ceil(N/E)``, changed where that costs least.

    Args:
        worth_BNE: what an expert is worth to a token, its price taken off, (B, N, E).
        best_BN: worth of the present owner, (B, N).
        owner_BN: experts (B, N), int64; overwritten.
        price_BE: prices of the experts. Where E does not divide N, the dearest have a place more.

    Returns:
        Experts (B, N). One by one, the token that loses least moves to the expert that is best for it among those
        with free places, which keeps the total within the sum of these losses of the best one.
    """
    num_problems, num_tokens, num_experts = worth_BNE.shape
    rows_RE, best_R, owner_R = worth_BNE.flatten(0, 1), best_BN.flatten(), owner_BN.view(-1)
    problem_R = torch.arange(num_problems, device=owner_BN.device).repeat_interleave(num_tokens)
    places_BE = _places(price_BE, num_tokens)
    while True:
        excess_BE = _counts(owner_BN, num_experts) - places_BE
        num_moves = int(excess_BE.clamp(min=0).sum())
        if num_moves == 0:
            return owner_BN
        candidate_K = (excess_BE[problem_R, owner_R] > 0).nonzero().squeeze(1)
        closed_KE = (excess_BE >= 0)[problem_R[candidate_K]]
        worth_KE = rows_RE.index_select(0, candidate_K).masked_fill_(closed_KE, -torch.inf)
        wanted = _CANDIDATES * num_moves + _MORE_CANDIDATES
        if wanted < candidate_K.numel():
            loss_K = best_R[candidate_K] - worth_KE.amax(dim=1)
            chosen = loss_K.topk(wanted, largest=False).indices
            candidate_K, worth_KE = candidate_K[chosen], worth_KE[chosen]
        few = (problem_R[candidate_K], owner_R[candidate_K], best_R[candidate_K], worth_KE, excess_BE)
        moved = _by_loss(*(tensor.cpu().numpy() for tensor in few))
        owner_R[candidate_K] = torch.from_numpy(moved).to(owner_R.device)


def _counts(owner_BN: Tensor, num_experts: int) -> Tensor:
    """Tokens at each expert, (B, E)."""
    counts_BE = torch.zeros(owner_BN.size(0), num_experts, dtype=torch.long, device=owner_BN.device)
    return counts_BE.scatter_add_(1, owner_BN, torch.ones_like(owner_BN))


def _places(price_BE: Tensor, num_tokens: int) -> Tensor:
    """Places of each expert, (B, E), int64."""
    num_experts = price_BE.size(1)
    places_BE = torch.full(price_BE.shape, num_tokens // num_experts, device=price_BE.device)
    dearest = price_BE.argsort(dim=1, descending=True, stable=True)[:, : num_tokens % num_experts]
    return places_BE.scatter_add_(1, dearest, torch.ones_like(dearest))


def _by_loss(
    problem_K: np.ndarray, owner_K: np.ndarray, best_K: np.ndarray, worth_KE: np.ndarray, excess_BE: np.ndarray
) -> np.ndarray:
    """Owners (K,) after the cheapest moves that there is room for."""
    num_experts = excess_BE.shape[1]
    owner_K, excess = owner_K.copy(), excess_BE.flatten()
    source_K = problem_K * num_experts + owner_K
    left = np.arange(owner_K.size)
    while True:
        left = left[excess[source_K[left]] > 0]
        if left.size == 0:
            return owner_K
        open_KE = (excess < 0).reshape(excess_BE.shape)[problem_K[left]]
        worth = np.where(open_KE, worth_KE[left], -np.inf)
        target = worth.argmax(axis=1)
        order = np.argsort(best_K[left] - worth[np.arange(left.size), target], kind="stable")
        left, target = left[order], target[order]
        source, goal = source_K[left], problem_K[left] * num_experts + target
        leaves = _place_in_queue(source) < excess[source]
        moves = np.flatnonzero(leaves)[_place_in_queue(goal[leaves]) < -excess[goal[leaves]]]
        owner_K[left[moves]] = target[moves]
        np.subtract.at(excess, source[moves], 1)
        np.add.at(excess, goal[moves], 1)
        left = np.delete(left, moves)


def _place_in_queue(group: np.ndarray) -> np.ndarray:
    """How many of the same group stand before each item."""
    order = np.argsort(group, kind="stable")
    sorted_group = group[order]
    place = np.empty_like(order)
    place[order] = np.arange(group.size) - np.searchsorted(sorted_group, sorted_group)
    return place
