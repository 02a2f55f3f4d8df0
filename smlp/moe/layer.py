"""tMoE: a chain of router, dispatcher, experts and dispatcher again.

Letters: ``B`` sequences, ``n`` tokens (n <= T), ``H`` features, ``N`` routed tokens, ``A`` assignments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from smlp.config.registration import call_problem
from smlp.errors import NaNError, UserError
from smlp.moe.dispatch import EveryExpertDispatcher, LocalDispatcher, TokenDispatcher
from smlp.moe.exchange import TokenShuffle
from smlp.moe.routers.routing import Router, Routing
from smlp.nn.state import ForwardContext, Observation
from smlp.ops.fast_paths import is_traced, needs_fixed_shapes, outside_graphs, sizes_may_depend_on_values
from smlp.parallel.spans import EXPERTS, GATE, PERMUTE, stage_of


class TokenMoE(nn.Module):
    """Experts over tokens.

    Padding is not routed or counted and gets a zero update, except in graphs with fixed shapes (``torch.export``). A
    token without an expert gets a zero update too.

    Args:
        router: decides; see :mod:`smlp.moe.routers`.
        experts: those of this rank, a module with ``expert_ids`` from (tokens (A, H), counts of each expert) to (A, H).
        name: of the layer, for error messages and reports.
        dispatcher: moves tokens; the local one by default.
        shuffle: mixes tokens over ranks in training.
    """

    def __init__(
        self,
        router: Router,
        experts: nn.Module,
        name: str,
        dispatcher: TokenDispatcher | None = None,
        shuffle: TokenShuffle | None = None,
    ) -> None:
        super().__init__()
        problem = call_problem(router, "x_NH", "token_ids_N", "plan")
        if problem is not None:
            raise UserError(f"{name}: build() of the router returned {router!r:.60}, which {problem}")
        self.router = router
        self.experts = experts
        self.name = name
        self.dispatcher = dispatcher or LocalDispatcher()
        self.shuffle = shuffle

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the update (B, n, H) to add to x, and the router's auxiliary losses.

        Raises:
            NaNError: routing scores are NaN; the message names the layer.
        """
        is_local = self.dispatcher.num_ranks == 1 and self.shuffle is None
        if is_local and getattr(self.experts, "fits_graphs", False) and sizes_may_depend_on_values():
            return self._chain(x_BnH, context)
        return self._chain_outside_graphs(x_BnH, context)

    # How many tokens an expert gets depends on the data, and ranks wait for each other.
    @outside_graphs
    def _chain_outside_graphs(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, dict[str, Tensor]]:
        return self._chain(x_BnH, context)

    def _chain(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, dict[str, Tensor]]:
        all_NH = x_NH = x_BnH.flatten(0, 1)
        token_ids_N = None if context.tokens_Bn is None else context.tokens_Bn.flatten()
        rows_N = way_back = None
        is_fixed = needs_fixed_shapes()
        dispatcher: TokenDispatcher = EveryExpertDispatcher() if is_fixed else self.dispatcher
        if context.valid_Bn is not None and not is_fixed:
            with stage_of(self.name, PERMUTE):
                rows_N = context.valid_Bn.flatten().nonzero().squeeze(1)
                token_ids_N = None if token_ids_N is None else token_ids_N.index_select(0, rows_N)
                x_NH = all_NH.index_select(0, rows_N)
        if self.shuffle is not None and self.training:
            x_NH, way_back = self.shuffle.out(x_NH)
            token_ids_N = None
        routing = self._route(x_NH, token_ids_N, context)
        with stage_of(self.name, PERMUTE):
            inputs, record = dispatcher.dispatch(x_NH, routing.plan)
            beside = self._beside_tokens(rows_N, record, context)
        with stage_of(self.name, EXPERTS):
            outputs = self.experts(inputs, record.counts, *beside)
        with stage_of(self.name, PERMUTE):
            update_NH = dispatcher.combine(outputs, routing.weight_A, record)
        if self.shuffle is not None and way_back is not None:
            update_NH = self.shuffle.back(update_NH, way_back)
        if rows_N is not None:
            with stage_of(self.name, PERMUTE):
                update_NH = torch.zeros_like(all_NH).index_copy(0, rows_N, update_NH.to(all_NH.dtype))
        return update_NH.view(x_BnH.shape), routing.aux_losses

    def _route(self, x_NH: Tensor, token_ids_N: Tensor | None, context: ForwardContext) -> Routing:
        """Ask the router, or keep to the plan of the context."""
        try:
            with stage_of(self.name, GATE):
                routing = self.router(x_NH, token_ids_N, context.plans.get(self))
        except FloatingPointError as error:
            raise NaNError.in_layer(self.name, error) from None
        if not is_traced():
            problem = routing.problem(len(x_NH)) if isinstance(routing, Routing) else f"{routing!r:.40}, not a Routing"
            if problem is not None:
                raise UserError(f"{self.name}: {type(self.router).__name__} returned {problem}")
        context.plans[self] = routing.plan
        if context.observe:
            weight_A = None if routing.weight_A is None else routing.weight_A.detach()
            context.observed(self, Observation(routing.plan, routing.logits_NE, weight_A))
        return routing

    def _beside_tokens(self, rows_N: Tensor | None, record: Any, context: ForwardContext) -> tuple[Any, ...]:
        """Return further arguments of the experts: none, unless they mix the tokens of a sequence.

        Args:
            rows_N: of the tokens in the flattened batch, (N,); None for all.
            record: of the dispatched tokens.
            context: of the forward pass.
        """
        return ()
