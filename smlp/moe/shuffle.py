"""Tokens mixed over ranks before they are routed, as in BASE's training (Lewis et al., 2021, section 3.2.1).

A balanced assignment gives every expert the same number of each rank's tokens, however much alike those are. Mixed
over the ranks of the expert group, a rank's tokens come from the batches of all of them.

Letters: ``N`` tokens of this rank, ``M`` tokens that it has while they are mixed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smlp.moe.exchange import num_sizes
from smlp.parallel.group import Group
from smlp.parallel.layout import ExpertLayout
from smlp.parallel.sizes import agree_on_sizes
from smlp.parallel.spans import BACK, OUT, stage_of


@dataclass(frozen=True)
class ShuffleRecord:
    """The way back."""

    #: which token stands in each row that was sent, (N,)
    token_N: Tensor
    send_splits: list[int]
    receive_splits: list[int]


class TokenShuffle:
    """Sends every rank of a group an equal share of this rank's tokens, drawn at random, and brings them back.

    Args:
        group: the expert group.
        layout: E/P experts on each of its ranks.
        name: of the layer, for error messages.
    """

    def __init__(self, group: Group, layout: ExpertLayout, name: str) -> None:
        self.group, self.num_sizes, self.layer = group, num_sizes(layout.num_local), name
        self.name = f"{name}, shuffle"

    def out(self, x_NH: Tensor) -> tuple[Tensor, ShuffleRecord]:
        """This rank's tokens (N, H) for tokens of all ranks, (M, H); and the record for :meth:`back`."""
        num_tokens, num_ranks = x_NH.size(0), self.group.size
        token_N = torch.randperm(num_tokens, device=x_NH.device)
        # what is left over of equal shares starts with the next rank, so that small batches spread as well
        shares = [
            num_tokens // num_ranks + ((other - self.group.rank) % num_ranks < num_tokens % num_ranks)
            for other in range(num_ranks)
        ]
        sizes_Pk = torch.zeros(num_ranks, self.num_sizes, dtype=torch.long, device=x_NH.device)
        sizes_Pk[:, 0] = torch.tensor(shares)
        received = [row[0] for row in agree_on_sizes(self.group, self.name, x_NH, sizes_Pk)]
        record = ShuffleRecord(token_N, shares, received)
        with stage_of(self.layer, OUT):
            return self.group.all_to_all(x_NH.index_select(0, token_N), shares, received, self.name), record

    def back(self, y_MH: Tensor, record: ShuffleRecord) -> Tensor:
        """Rows for the tokens that :meth:`out` returned, (M, H), to their ranks, (N, H), as they lay there."""
        with stage_of(self.layer, BACK):
            y_NH = self.group.all_to_all(y_MH, record.receive_splits, record.send_splits, f"{self.name}, back")
        return torch.empty_like(y_NH).index_copy(0, record.token_N, y_NH)
