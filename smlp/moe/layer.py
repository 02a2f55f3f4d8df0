"""tMoE: a chain of router, dispatcher, experts and dispatcher again.

Letters: ``B`` sequences, ``n`` tokens (n <= T), ``H`` features, ``N`` routed tokens, ``A`` assignments.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smlp.errors import NaNError, UserError
from smlp.moe.dispatch import LocalDispatcher, TokenDispatcher
from smlp.moe.experts import FeedForwardExperts
from smlp.moe.gated_experts import GatedMLPExperts
from smlp.moe.routers import Router, Routing
from smlp.moe.shuffle import TokenShuffle
from smlp.nn.state import ForwardContext, Observation
from smlp.parallel.spans import EXPERTS, GATE, PERMUTE, stage_of


class TokenMoE(nn.Module):
    """Experts over tokens.

    Padding is never routed and never counted: it gets a zero update, and so does a token without an expert.

    Args:
        router: decides; see :mod:`smlp.moe.routers`.
        experts: those of this rank.
        name: of the layer, for error messages and reports.
        dispatcher: moves tokens; the local one by default.
        shuffle: mixes tokens over ranks in training; not for experts that ask where their tokens stand.
    """

    def __init__(
        self,
        router: Router,
        experts: FeedForwardExperts | GatedMLPExperts,
        name: str,
        dispatcher: TokenDispatcher | None = None,
        shuffle: TokenShuffle | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.name = name
        self.dispatcher = dispatcher or LocalDispatcher()
        self.shuffle = shuffle

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, dict[str, Tensor]]:
        """The update (B, n, H) to add to x, and the router's auxiliary losses.

        Raises:
            NaNError: routing scores are NaN; the message names the layer.
            UserError: incremental decoding with gMLP experts that are spread over ranks.
        """
        x_NH = x_BnH.flatten(0, 1)
        token_ids_N = None if context.tokens_Bn is None else context.tokens_Bn.flatten()
        if context.valid_Bn is None:
            update_NH, aux_losses = self._shuffled(x_NH, token_ids_N, None, context)
        else:
            with stage_of(self.name, PERMUTE):
                rows_N = context.valid_Bn.flatten().nonzero().squeeze(1)
                token_ids_N = None if token_ids_N is None else token_ids_N.index_select(0, rows_N)
                valid_NH = x_NH.index_select(0, rows_N)
            routed, aux_losses = self._shuffled(valid_NH, token_ids_N, rows_N, context)
            with stage_of(self.name, PERMUTE):
                update_NH = torch.zeros_like(x_NH).index_copy(0, rows_N, routed.to(x_NH.dtype))
        return update_NH.view(x_BnH.shape), aux_losses

    def _shuffled(
        self, x_NH: Tensor, token_ids_N: Tensor | None, rows_N: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Routes tokens, among those of other ranks where they are to be mixed."""
        if self.shuffle is None or not self.training:
            return self._route(x_NH, token_ids_N, rows_N, context)
        mixed, record = self.shuffle.out(x_NH)
        update, aux_losses = self._route(mixed, None, None, context)
        return self.shuffle.back(update, record), aux_losses

    def _route(
        self, x_NH: Tensor, token_ids_N: Tensor | None, rows_N: Tensor | None, context: ForwardContext
    ) -> tuple[Tensor, dict[str, Tensor]]:
        try:
            with stage_of(self.name, GATE):
                routing = self.router(x_NH, token_ids_N, context.plans.get(self))
        except FloatingPointError as error:
            raise NaNError.in_layer(self.name, error) from None
        context.plans[self] = routing.plan
        context.observed(self, Observation(routing.plan, routing.logits_NE))
        place_N2 = None
        if isinstance(self.experts, GatedMLPExperts):
            if context.state is not None and not isinstance(self.dispatcher, LocalDispatcher):
                raise UserError(
                    f"{self.name}: text is written token by token only where each rank holds all experts: load the "
                    "model with an expert-parallel size of 1"
                )
            if rows_N is None:
                rows_N = torch.arange(x_NH.size(0), device=x_NH.device)
            place_N2 = _places(rows_N, context)
        return self._through_experts(x_NH, routing, place_N2, context), routing.aux_losses

    def _through_experts(
        self, x_NH: Tensor, routing: Routing, place_N2: Tensor | None, context: ForwardContext
    ) -> Tensor:
        """Tokens (N, H), whose places are given if the experts want them, to their experts and back."""
        plan, weight_A = routing.plan, routing.weight_A
        with stage_of(self.name, PERMUTE):
            inputs, record = self.dispatcher.dispatch(x_NH, plan)
            where = ()
            if place_N2 is not None:
                where = (*self.dispatcher.dispatch_places(place_N2, context.num_seqs, record), context)
        with stage_of(self.name, EXPERTS):
            outputs = self.experts(inputs, record.counts, *where)
        with stage_of(self.name, PERMUTE):
            return self.dispatcher.combine(outputs, weight_A, record)


def _places(rows_N: Tensor, context: ForwardContext) -> Tensor:
    """Sequence and absolute position of rows of the flattened (B, n) batch, (N, 2)."""
    sequence_N = rows_N.div(context.num_new_tokens, rounding_mode="floor")
    return torch.stack([sequence_N, rows_N % context.num_new_tokens + context.start], dim=1)
