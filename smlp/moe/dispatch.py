"""Dispatchers move tokens to experts and back; they own no parameters.

A dispatcher has two twin methods. What ``combine`` needs travels in a frozen record, never on ``self``:

    inputs, record = dispatcher.dispatch(x_NH, plan)
    outputs = experts(inputs, record.counts)
    y_NH = dispatcher.combine(outputs, weight_A, record)

:class:`LocalDispatcher` keeps everything on one rank. Those of :mod:`smlp.moe.exchange`, which send tokens to the ranks
of their experts, have the same signatures: ``record.counts`` then counts the tokens that this rank's experts received.

The sMoE cuts features, not tokens; :class:`LocalFeatureDispatcher` is the same idea for chunks of the features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from smlp.moe.plan import RoutingPlan
from smlp.ops import permuted_rows, summed_rows
from smlp.ops.fast_paths import sizes_may_depend_on_values


class TokenDispatcher(Protocol):
    """Moves tokens; see :class:`LocalDispatcher` for what the methods do."""

    #: ranks among which tokens move
    num_ranks: int

    def dispatch(self, x_NH: Tensor, plan: RoutingPlan) -> tuple[Tensor, Any]: ...

    def dispatch_places(self, place_N2: Tensor, num_seqs: int, record: Any) -> tuple[Tensor, int]: ...

    def combine(self, y_AH: Tensor, weight_A: Tensor | None, record: Any) -> Tensor: ...


class FeatureDispatcher(Protocol):
    """Moves chunks of the features; see :class:`LocalFeatureDispatcher`."""

    def dispatch(self, x_BmH: Tensor, num_experts: int, start: int = 0) -> tuple[Tensor, Any]: ...

    def combine(self, y: Tensor, record: Any) -> Tensor: ...


@dataclass(frozen=True)
class DispatchRecord:
    """All that :meth:`LocalDispatcher.combine` needs."""

    plan: RoutingPlan
    #: tokens of each expert of this rank, in the order in which they lie in the dispatched tensor; a tensor (e,) in a
    #: graph that does not know them
    counts: list[int] | Tensor


class LocalDispatcher:
    """Sorts tokens by expert, within one rank."""

    num_ranks = 1

    def dispatch(self, x_NH: Tensor, plan: RoutingPlan) -> tuple[Tensor, DispatchRecord]:
        """Return the tokens in the order of the plan.

        Args:
            x_NH: (N, H).
            plan: which token goes to which expert.

        Returns:
            (A, H), sorted by expert, and the record for :meth:`combine`.
        """
        if plan.place_N is None:
            x_AH = x_NH.index_select(0, plan.token_A)
        else:
            x_AH = permuted_rows(x_NH, plan.token_A, plan.place_N)
        counts = plan.counts_E if sizes_may_depend_on_values() else plan.counts_E.tolist()
        return x_AH, DispatchRecord(plan, counts)

    def dispatch_places(self, place_N2: Tensor, num_seqs: int, record: DispatchRecord) -> tuple[Tensor, int]:
        """Return where the dispatched tokens stand.

        Args:
            place_N2: sequence and position of each token, (N, 2).
            num_seqs: sequences of this rank's batch.
            record: from :meth:`dispatch`.

        Returns:
            (A, 2) in the order of the dispatched tokens, and the number of sequences among which they are.
        """
        return place_N2.index_select(0, record.plan.token_A), num_seqs

    def combine(self, y_AH: Tensor, weight_A: Tensor | None, record: DispatchRecord) -> Tensor:
        """Sum the weighted expert outputs of each token. Tokens without an expert get zeros.

        Args:
            y_AH: expert outputs in dispatched order, (A, H).
            weight_A: weight of each assignment, (A,), or None for ones.
            record: from :meth:`dispatch`.

        Returns:
            (N, H).
        """
        plan = record.plan
        if weight_A is not None:
            y_AH = y_AH * weight_A.to(y_AH.dtype).unsqueeze(1)
        if plan.place_N is None:
            return summed_rows(y_AH, plan.token_A, plan.num_tokens)
        return permuted_rows(y_AH, plan.place_N, plan.token_A)  # every token has exactly one row


class EveryExpertDispatcher(LocalDispatcher):
    """Gives every token to every expert and keeps the outputs that the plan asks for, within one rank.

    Its shapes do not depend on the data, so that ``torch.export`` and ONNX can hold a sparse layer. Outputs are those
    of :class:`LocalDispatcher`, for E times the work.
    """

    def dispatch(self, x_NH: Tensor, plan: RoutingPlan) -> tuple[Tensor, DispatchRecord]:
        """Return (E*N, H), all tokens once for each expert, and the record for :meth:`combine`."""
        num_experts = plan.num_experts
        return x_NH.repeat(num_experts, 1), DispatchRecord(plan, [x_NH.size(0)] * num_experts)

    def combine(self, y_XH: Tensor, weight_A: Tensor | None, record: DispatchRecord) -> Tensor:
        """Sum the outputs that the plan asks for, out of all expert outputs (E*N, H) of :meth:`dispatch`."""
        plan = record.plan
        y_AH = y_XH.index_select(0, plan.expert_A * plan.num_tokens + plan.token_A)
        return super().combine(y_AH, weight_A, record)


@dataclass(frozen=True)
class FeatureDispatchRecord:
    """All that :meth:`LocalFeatureDispatcher.combine` needs."""

    #: sequences of each rank of the group, in the order in which they lie in the dispatched tensor
    num_seqs: list[int]
    #: first position whose output some rank needs, from which the experts compute
    start: int


class LocalFeatureDispatcher:
    """Cuts the features into one chunk for each expert, within one rank.

    :class:`smlp.moe.exchange.FeatureExchange`, which exchanges chunks by all-to-all, has the same two signatures: it
    returns this rank's chunks of the sequences of all ranks, and ``record.num_seqs`` says whose they are.
    """

    def dispatch(self, x_BmH: Tensor, num_experts: int, start: int = 0) -> tuple[Tensor, FeatureDispatchRecord]:
        """Cut (B, m, H) into (B, m, E, H/E), chunk i being expert i's; return it and the record for :meth:`combine`.

        ``start`` is the first position whose output is wanted.
        """
        return x_BmH.unflatten(2, (num_experts, -1)), FeatureDispatchRecord([x_BmH.size(0)], start)

    def combine(self, y_BqEc: Tensor, record: FeatureDispatchRecord) -> Tensor:
        """Join outputs at positions ``record.start`` .. m-1, (B, q, E, H/E), to (B, q, H)."""
        return y_BqEc.flatten(2)
