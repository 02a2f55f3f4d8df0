"""Dispatchers that send one chunk of the local experts' work while another is computed.

The experts of a rank are cut into consecutive chunks, an expert always whole: with one expert on a rank there is
nothing to overlap. Sizes are agreed on once for the layer, then all chunks are sent at once; a chunk's experts run when
it has arrived, and its results leave as soon as they are there. The backward pass does the same from the last chunk to
the first. What is computed is the same as without chunks, and so are parameters and their names.

Beside what :mod:`smlp.moe.exchange` holds, rows to be sent stay until they have arrived, on both ways, and so does the
gradient of each chunk's weights until the layer's is put together.

Letters: as in :mod:`smlp.moe.exchange`; ``C`` chunks, ``k`` experts of a chunk on each rank, ``E`` all experts of the
group in the order in which they travel: by chunk, then rank, then local expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from smlp.moe.dispatch import add_up
from smlp.moe.exchange import FeatureExchange, TokenExchange
from smlp.moe.experts import SpatialExperts
from smlp.moe.plan import RoutingPlan
from smlp.nn.state import ForwardContext
from smlp.parallel.group import DistributedGroup
from smlp.parallel.in_chunks import Trip, begin, end, start_of_order
from smlp.parallel.layout import ExpertLayout
from smlp.parallel.spans import BACK, EXPERTS, OUT, PERMUTE, stage_of


def chunk_sizes(num_local: int, num_chunks: int) -> list[int]:
    """Experts of each chunk, as equal as they can be."""
    return [num_local // num_chunks + (chunk < num_local % num_chunks) for chunk in range(num_chunks)]


def travelling_order(num_ranks: int, sizes: Sequence[int]) -> list[int]:
    """Global ids of all experts by chunk, then rank, then local expert."""
    num_local, ends = sum(sizes), list(accumulate(sizes))
    return [
        rank * num_local + local
        for end_of_chunk, size in zip(ends, sizes, strict=True)
        for rank in range(num_ranks)
        for local in range(end_of_chunk - size, end_of_chunk)
    ]


def _parameters_of_chunks(experts: nn.Module, sizes: list[int]) -> Iterator[dict[str, Tensor]]:
    """What makes the experts' module that of one chunk alone, chunk after chunk."""
    # split gives one stacked gradient in the backward pass instead of one full-size gradient per chunk
    parts = {name: parameter.split(sizes) for name, parameter in experts.named_parameters()}
    for chunk in range(len(sizes)):
        yield {name: part[chunk] for name, part in parts.items()}


class ChunkedTokenExchange(TokenExchange):
    """Sends each token to the rank of its expert, in chunks of experts.

    Args:
        group: the expert group.
        layout: E/P experts on each of its ranks.
        name: of the layer, for error messages.
        num_chunks: C, at most E/P.
    """

    def __init__(self, group: DistributedGroup, layout: ExpertLayout, name: str, num_chunks: int) -> None:
        super().__init__(group, layout, name)
        self.sizes = chunk_sizes(layout.num_local, num_chunks)
        self.order_E = travelling_order(group.size, self.sizes)

    def through(
        self,
        experts: nn.Module,
        x_NH: Tensor,
        plan: RoutingPlan,
        weight_A: Tensor | None,
        places: tuple[Tensor, ForwardContext] | None = None,
    ) -> Tensor:
        """Tokens to their experts, through them and back: dispatch, experts and combine in one.

        Args:
            experts: those of this rank.
            x_NH: (N, H).
            plan: which token goes to which expert.
            weight_A: weight of each assignment, (A,), or None for ones.
            places: sequence and position of each token, (N, 2), and the context they are of, if the experts want them.

        Returns:
            (N, H).
        """
        all_chunks = list(range(len(self.sizes)))
        with stage_of(self.name, PERMUTE):
            sent_Pe, received_Pe = self.agree(x_NH, plan)
            counts = zip(sent_Pe.split(self.sizes, dim=1), received_Pe.split(self.sizes, dim=1), strict=True)
            records = [self.record(plan, sent_Pk, received_Pk, x_NH.device) for sent_Pk, received_Pk in counts]
            place_E = torch.tensor(self.order_E, device=x_NH.device).argsort()
            order_A = place_E[plan.expert_A].argsort(stable=True)
            token_A = plan.token_A[order_A]
            x_AH = x_NH.index_select(0, token_A)
        splits = [record.send_splits for record in records], [record.receive_splits for record in records]
        out = Trip(self.group, *splits, splits=True, name=f"{self.name}, dispatch")
        back = Trip(self.group, *splits[::-1], splits=False, name=f"{self.name}, combine")
        with stage_of(self.name, OUT):
            order = begin(x_AH, start_of_order(x_AH), out, all_chunks)
        arguments = [(record.counts,) for record in records]
        if places is not None:
            place_N2, context = places
            with stage_of(self.name, PERMUTE):
                record = self.record(plan, sent_Pe, received_Pe, x_NH.device)
                place_R2, num_seqs = self.dispatch_places(place_N2, context.num_seqs, record)
            place_of_chunks = place_R2.split([sum(counts) for (counts,) in arguments])
            arguments = [
                (*own, place, num_seqs, context) for own, place in zip(arguments, place_of_chunks, strict=True)
            ]
        for chunk, parameters in enumerate(_parameters_of_chunks(experts, self.sizes)):
            with stage_of(self.name, OUT):
                rows, order = end(order, out, [chunk])
            with stage_of(self.name, PERMUTE):
                rows = self.by_expert(rows, records[chunk])
            with stage_of(self.name, EXPERTS):
                rows = functional_call(experts, parameters, (rows, *arguments[chunk]))
            with stage_of(self.name, PERMUTE):
                rows = self.by_source(rows, records[chunk])
            with stage_of(self.name, BACK):
                order = begin(rows, order, back, [chunk])
        with stage_of(self.name, BACK):
            y_AH, _ = end(order, back, all_chunks)
        with stage_of(self.name, PERMUTE):
            return add_up(y_AH, None if weight_A is None else weight_A[order_A], token_A, plan.num_tokens)


class ChunkedFeatureExchange(FeatureExchange):
    """Sends each rank the features that its experts work on, in chunks of experts.

    Rows that travel are the H/E features of one expert at one position; as many numbers leave a rank as without chunks.

    Args: as for :class:`ChunkedTokenExchange`.
    """

    def __init__(self, group: DistributedGroup, layout: ExpertLayout, name: str, num_chunks: int) -> None:
        super().__init__(group, layout, name)
        self.sizes = chunk_sizes(layout.num_local, num_chunks)
        self.order_E = travelling_order(group.size, self.sizes)

    def through(self, experts: SpatialExperts, x_BmH: Tensor, num_experts: int, start: int = 0) -> Tensor:
        """(B, m, H) to the experts, through them and back: outputs at positions ``start`` and on, (B, q, H)."""
        all_chunks, order_E = list(range(len(self.sizes))), torch.tensor(self.order_E, device=x_BmH.device)
        num_seqs, num_tokens, width = x_BmH.shape
        own_rows, own_results = num_seqs * num_tokens, num_seqs * (num_tokens - start)
        with stage_of(self.name, PERMUTE):
            sizes = self.agree(x_BmH, start)
            record = self.record(sizes)
            x_NEc = x_BmH.reshape(own_rows, num_experts, width // num_experts)
            rows = x_NEc.transpose(0, 1).index_select(0, order_E).flatten(0, 1)
        out = self._trip("dispatch", [own_rows] * self.group.size, [count * length for count, length, _ in sizes], True)
        results = [count * (length - first) for count, length, first in sizes]
        back = self._trip("combine", results, [own_results] * self.group.size, False)
        with stage_of(self.name, OUT):
            order = begin(rows, start_of_order(rows), out, all_chunks)
        for chunk, parameters in enumerate(_parameters_of_chunks(experts, self.sizes)):
            with stage_of(self.name, OUT):
                rows, order = end(order, out, [chunk])
            with stage_of(self.name, PERMUTE):
                x_Smkc = _sequences(rows, sizes, self.sizes[chunk])
            with stage_of(self.name, EXPERTS):
                y_Sqkc = functional_call(experts, parameters, (x_Smkc, record.start))
            with stage_of(self.name, PERMUTE):
                parts = [
                    part[:, first - record.start : last - record.start].permute(2, 0, 1, 3).flatten(0, 2)
                    for part, (first, last) in zip(y_Sqkc.split(record.num_seqs), record.wanted, strict=True)
                ]
                rows = torch.cat(parts)
            with stage_of(self.name, BACK):
                order = begin(rows, order, back, [chunk])
        with stage_of(self.name, BACK):
            rows, _ = end(order, back, all_chunks)
        with stage_of(self.name, PERMUTE):
            y_NEc = rows.view(num_experts, own_results, rows.size(1)).transpose(0, 1).index_select(1, order_E.argsort())
            return y_NEc.flatten(1).unflatten(0, (num_seqs, num_tokens - start))

    def _trip(self, what: str, send: Sequence[int], receive: Sequence[int], splits: bool) -> Trip:
        """One way; ``send`` and ``receive`` are rows of one expert for, and from, each rank."""
        by_chunk = ([[size * rows for rows in rows_P] for size in self.sizes] for rows_P in (send, receive))
        return Trip(self.group, *by_chunk, splits=splits, name=f"{self.name}, {what}")


def _sequences(rows: Tensor, sizes: list[tuple[int, int, int]], num_experts: int) -> Tensor:
    """Rows that lie as [source][expert][sequence][position], with the sizes of :meth:`FeatureExchange.agree`, as
    sequences (S, longest m, k, c), padded on the right."""
    longest = max(length for _, length, _ in sizes)
    parts = rows.split([num_experts * count * length for count, length, _ in sizes])
    padded = [
        F.pad(part.view(num_experts, count, length, part.size(1)), (0, 0, 0, longest - length))
        for part, (count, length, _) in zip(parts, sizes, strict=True)
    ]
    return torch.cat(padded, dim=1).permute(1, 2, 0, 3)
