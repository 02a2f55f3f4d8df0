"""Dispatchers that move tokens, or chunks of the features, to the ranks of their experts and back.

Every call runs the same collectives on every rank of the expert group, whatever is in its batch: sizes are exchanged
first, and nothing is skipped because it is empty. The signatures are those of :mod:`smlp.moe.dispatch`.

Letters: ``P`` ranks of the group, ``e`` experts on each, ``N`` this rank's tokens, ``A`` its assignments, ``R`` tokens
received for its experts, ``S`` sequences of all ranks, ``m`` positions up to now, ``q`` those whose output is wanted,
``c`` = H/E features of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from smlp.moe.dispatch import DispatchRecord, FeatureDispatchRecord, LocalDispatcher
from smlp.moe.plan import RoutingPlan
from smlp.parallel.group import Group, agree_on_sizes
from smlp.parallel.ranks import ExpertLayout
from smlp.parallel.spans import BACK, OUT, stage_of

#: numbers that the ranks of an sMoE exchange: sequences, positions, first position wanted
_FEATURE_SIZES = 3


def num_sizes(num_local: int) -> int:
    """Return how many numbers the ranks of an expert group tell each other before data move.

    It is the same in every layer, so that a rank in another layer is noticed, not waited for.
    """
    return max(num_local, _FEATURE_SIZES)


@dataclass(frozen=True)
class TokenExchangeRecord(DispatchRecord):
    """All that :meth:`TokenExchange.combine` needs."""

    #: tokens sent to each rank, and received from each
    send_splits: list[int]
    receive_splits: list[int]
    #: received row of each token that an expert of this rank gets, (R,): by expert, then source rank, then token;
    #: None if they are in that order already
    row_R: Tensor | None


class TokenExchange:
    """Sends each token to the rank of its expert.

    Tokens travel sorted by expert, which is by rank too. They arrive as [source rank][expert][token] and are handed to
    the experts as [expert][source rank][token].

    Args:
        group: the expert group.
        layout: E/P experts on each of its ranks.
        name: of the layer, for error messages.
    """

    def __init__(self, group: Group, layout: ExpertLayout, name: str) -> None:
        self.group, self.num_local, self.name = group, layout.num_local, name
        self.num_ranks = group.size
        self.local = LocalDispatcher()

    def dispatch(self, x_NH: Tensor, plan: RoutingPlan) -> tuple[Tensor, TokenExchangeRecord]:
        """Send tokens (N, H); return those for this rank's experts, (R, H), and the record for :meth:`combine`."""
        x_AH, _ = self.local.dispatch(x_NH, plan)
        record = self._agree(x_NH, plan)
        return self._by_expert(self._send(x_AH, record), record), record

    def _agree(self, x_NH: Tensor, plan: RoutingPlan) -> TokenExchangeRecord:
        """Tell the ranks how many tokens each of their experts will get, and hear the same for this rank's experts."""
        sent_Pe = plan.counts_E.view(self.group.size, self.num_local)
        padding = num_sizes(self.num_local) - self.num_local
        received = agree_on_sizes(self.group, self.name, x_NH, F.pad(sent_Pe, (0, padding)))
        received_Pe = torch.tensor([row[: self.num_local] for row in received])
        return TokenExchangeRecord(
            plan,
            counts=received_Pe.sum(dim=0).tolist(),
            send_splits=sent_Pe.sum(dim=1).tolist(),
            receive_splits=received_Pe.sum(dim=1).tolist(),
            row_R=_rows_by_expert(received_Pe.to(x_NH.device)) if self.num_local > 1 else None,
        )

    def dispatch_places(self, place_N2: Tensor, num_seqs: int, record: TokenExchangeRecord) -> tuple[Tensor, int]:
        """Return the sequence and position of the tokens at this rank's experts, (R, 2), and how many sequences.

        Sequences are renumbered, so that no two ranks share one.
        """
        place_A2, _ = self.local.dispatch_places(place_N2, num_seqs, record)
        sources = self._send(place_A2, record).split(record.receive_splits)
        renumbered, num_before = [], 0
        for place_R2 in sources:
            renumbered.append(place_R2 + place_R2.new_tensor([num_before, 0]))
            num_before += int(place_R2[:, 0].max()) + 1 if place_R2.size(0) else 0
        return self._by_expert(torch.cat(renumbered), record), num_before

    def combine(self, y_RH: Tensor, weight_A: Tensor | None, record: TokenExchangeRecord) -> Tensor:
        """Send expert outputs (R, H) back to their ranks, where they are weighted and summed for each token, (N, H)."""
        y_RH = self._by_source(y_RH, record)
        with stage_of(self.name, BACK):
            y_AH = self.group.all_to_all(y_RH, record.receive_splits, record.send_splits, f"{self.name}, combine")
        return self.local.combine(y_AH, weight_A, record)

    def _send(self, x_A: Tensor, record: TokenExchangeRecord) -> Tensor:
        with stage_of(self.name, OUT):
            return self.group.all_to_all(x_A, record.send_splits, record.receive_splits, f"{self.name}, dispatch")

    def _by_expert(self, x_R: Tensor, record: TokenExchangeRecord) -> Tensor:
        """Bring rows as they arrive, (R, ...), into the order in which the experts take them."""
        return x_R if record.row_R is None else x_R.index_select(0, record.row_R)

    def _by_source(self, y_R: Tensor, record: TokenExchangeRecord) -> Tensor:
        """Invert :meth:`_by_expert`."""
        return y_R if record.row_R is None else torch.empty_like(y_R).index_copy(0, record.row_R, y_R)


def _rows_by_expert(received_Pe: Tensor) -> Tensor:
    """Return the order (R,) that brings rows from [source][expert][token] to [expert][source][token]."""
    num_sources, num_local = received_Pe.shape
    local_e = torch.arange(num_local, device=received_Pe.device)
    expert_R = local_e.repeat(num_sources).repeat_interleave(received_Pe.flatten())
    return expert_R.argsort(stable=True)


@dataclass(frozen=True)
class FeatureExchangeRecord(FeatureDispatchRecord):
    """All that :meth:`FeatureExchange.combine` needs."""

    #: for each rank, the range of positions whose outputs it needs: first, and one after the last
    wanted: list[tuple[int, int]]


class FeatureExchange:
    """Sends each rank the chunks of the features that its experts work on.

    Sequences of different lengths are padded on the right for the experts, which are causal; nothing but data travels:
    B*m*H*(P-1)/P numbers leave a rank.

    Args: as for :class:`TokenExchange`.
    """

    def __init__(self, group: Group, layout: ExpertLayout, name: str) -> None:
        self.group, self.num_local, self.name = group, layout.num_local, name

    def dispatch(self, x_BmH: Tensor, num_experts: int, start: int = 0) -> tuple[Tensor, FeatureExchangeRecord]:
        """Send features (B, m, H); return the chunks of this rank's experts, (S, longest m, e, c), and the record."""
        num_ranks = self.group.size
        num_seqs, num_tokens, width = x_BmH.shape
        sizes = self._agree(x_BmH, start)
        rows = x_BmH.reshape(num_seqs * num_tokens, num_ranks, width // num_ranks).transpose(0, 1).flatten(0, 1)
        splits = [count * length for count, length, _ in sizes]
        with stage_of(self.name, OUT):
            rows = self.group.all_to_all(rows, [num_seqs * num_tokens] * num_ranks, splits, f"{self.name}, dispatch")
        longest = max(length for _, length, _ in sizes)
        if all(length == longest for _, length, _ in sizes):
            chunks = rows.view(sum(count for count, _, _ in sizes), longest, rows.size(1))
        else:
            parts = [
                F.pad(part.view(count, length, part.size(1)), (0, 0, 0, longest - length))
                for part, (count, length, _) in zip(rows.split(splits), sizes, strict=True)
            ]
            chunks = torch.cat(parts)
        record = FeatureExchangeRecord(
            num_seqs=[count for count, _, _ in sizes],
            start=min((first for count, _, first in sizes if count), default=0),
            wanted=[(first, length) for _, length, first in sizes],
        )
        return chunks.unflatten(2, (self.num_local, -1)), record

    def _agree(self, x_BmH: Tensor, start: int) -> list[tuple[int, int, int]]:
        """Return each rank's number of sequences, of positions, and the first position whose output it wants."""
        own = torch.zeros(num_sizes(self.num_local), dtype=torch.long, device=x_BmH.device)
        own[:_FEATURE_SIZES] = torch.tensor([x_BmH.size(0), x_BmH.size(1), start])
        received = agree_on_sizes(self.group, self.name, x_BmH, own.expand(self.group.size, -1))
        return [(row[0], row[1], row[2]) for row in received]

    def combine(self, y_SqEc: Tensor, record: FeatureExchangeRecord) -> Tensor:
        """Send outputs at positions ``record.start`` and on, (S, q, e, c), back to their ranks, (B, q, H)."""
        num_ranks = self.group.size
        parts = [
            part[:, first - record.start : end - record.start].flatten(2).flatten(0, 1)
            for part, (first, end) in zip(y_SqEc.split(record.num_seqs), record.wanted, strict=True)
        ]
        num_seqs, (first, end) = record.num_seqs[self.group.rank], record.wanted[self.group.rank]
        own = num_seqs * (end - first)
        sent, splits = torch.cat(parts), [part.size(0) for part in parts]
        with stage_of(self.name, BACK):
            rows = self.group.all_to_all(sent, splits, [own] * num_ranks, f"{self.name}, combine")
        rows = rows.unflatten(0, (num_ranks, own)).transpose(0, 1).flatten(1)
        return rows.unflatten(0, (num_seqs, end - first))


@dataclass(frozen=True)
class ShuffleRecord:
    """All that :meth:`TokenShuffle.back` needs."""

    #: the token in each row that was sent, (N,)
    token_N: Tensor
    send_splits: list[int]
    receive_splits: list[int]


class TokenShuffle:
    """Sends every rank of a group an equal share of this rank's tokens, drawn at random, and brings them back.

    BASE's training routes tokens that are mixed over ranks (Lewis et al., 2021, section 3.2.1). A balanced assignment
    gives every expert the same number of each rank's tokens, however much alike those are; mixed, a rank's tokens come
    from the batches of all of them. ``M`` are the tokens that a rank has while they are mixed.

    Args:
        group: the expert group.
        layout: E/P experts on each of its ranks.
        name: of the layer, for error messages.
    """

    def __init__(self, group: Group, layout: ExpertLayout, name: str) -> None:
        self.group, self.num_sizes, self.layer = group, num_sizes(layout.num_local), name
        self.name = f"{name}, shuffle"

    def out(self, x_NH: Tensor) -> tuple[Tensor, ShuffleRecord]:
        """Exchange this rank's tokens (N, H) for tokens of all ranks, (M, H); return them and the record."""
        num_tokens, num_ranks = x_NH.size(0), self.group.size
        token_N = torch.randperm(num_tokens, device=x_NH.device)
        # the remainder of equal shares starts with the next rank, so that small batches are spread too
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
        """Send the rows of the tokens of :meth:`out`, (M, H), back; return those of this rank, (N, H), in order."""
        with stage_of(self.layer, BACK):
            y_NH = self.group.all_to_all(y_MH, record.receive_splits, record.send_splits, f"{self.name}, back")
        return torch.empty_like(y_NH).index_copy(0, record.token_N, y_NH)
