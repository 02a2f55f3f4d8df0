"""gMLP-MoE: whole gMLP layers as experts of tokens, an ablation (Yu et al., 2022, appendix A).

The spatial gating unit of an expert sees only the tokens of a sequence that were routed to it, in order. Spatial
weights are indexed by absolute position, so that with one expert the layer is a gMLP layer.

Letters: ``A`` routed tokens sorted by expert and position, ``e`` experts on this rank, ``S`` sequences, ``M`` most
tokens of one sequence at one expert, ``Q`` queries, ``K`` experts of a token, ``C`` = F/2 gating features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.costs.component import LAYER_NORM_FLOPS, Component, dropout_keeps, linear_parameters
from smlp.errors import UserError
from smlp.moe.experts import xavier_bound
from smlp.moe.layer import TokenMoE
from smlp.moe.plan import slots
from smlp.nn.blocks.base import AuxLosses, Block, BlockKind, register_sparse_block
from smlp.nn.blocks.gmlp import check_halves
from smlp.nn.blocks.sparse import router_costs, token_dispatcher
from smlp.nn.layers import Dropout, SpatialWeights, spatial_parameters, uniform_rows
from smlp.nn.state import ForwardContext
from smlp.ops import activated_halves, linear
from smlp.ops.fast_paths import add_operator, needs_fixed_shapes
from smlp.ops.rows import occurrences
from smlp.parallel import Ranks, one_process

GATED_MLP_EXPERTS = "gMLP experts"


def sparse_spatial_projection(
    query_Q2: Tensor, key_A2: Tensor, x_AC: Tensor, weight_TT: Tensor, bias_T: Tensor, num_seqs: int
) -> Tensor:
    """Return ``sum_j W[t_i, t_j] x_j + b[t_i]`` over the keys j of the same sequence with ``t_j <= t_i``.

    Args:
        query_Q2: sequence and position of each query, (Q, 2).
        key_A2: the same of each key, (A, 2).
        x_AC: features of the keys, (A, C).
        weight_TT, bias_T: spatial weights of one expert.
        num_seqs: S.

    Returns:
        (Q, C).
    """
    query_SM, is_query_SM = _by_sequence(query_Q2[:, 0], num_seqs)
    key_SM, is_key_SM = _by_sequence(key_A2[:, 0], num_seqs)
    row_SM1, column_S1M = query_Q2[query_SM, 1].unsqueeze(2), key_A2[key_SM, 1].unsqueeze(1)
    seen_SMM = (column_S1M <= row_SM1) & is_key_SM.unsqueeze(1)
    mixed_SMC = torch.bmm(weight_TT[row_SM1, column_S1M] * seen_SMM, x_AC[key_SM])
    return mixed_SMC[is_query_SM] + bias_T[query_Q2[:, 1]].unsqueeze(1)


def _by_sequence(sequence_A: Tensor, num_seqs: int) -> tuple[Tensor, Tensor]:
    """Return a table of items with a row for each sequence: their indices (S, M), and a mask of filled cells."""
    counts_S = occurrences(sequence_A, num_seqs)
    index_SM = sequence_A.new_zeros(num_seqs, int(counts_S.max()) if num_seqs else 0)
    index_SM[sequence_A, slots(sequence_A, num_seqs)] = torch.arange(sequence_A.numel(), device=sequence_A.device)
    return index_SM, torch.arange(index_SM.size(1), device=sequence_A.device) < counts_S.unsqueeze(1)


class GatedMLPExperts(nn.Module):
    """gMLP layers ``V(s(act(U(LN(x)))))``, each over its own tokens (Yu et al., 2022, appendix A, figure 6 right).

    Args:
        embed_dim, ffn_dim, max_tokens: H, F, T.
        expert_ids: global ids of the experts on this rank.
        activation: "gelu", "relu" or "swish".
        weight_bound: spatial weights start as U(-bound, bound).
        experts_per_token: k, most experts that a token goes to.
        is_toeplitz, average, num_all: of the spatial weights, as in :class:`smlp.nn.layers.SpatialWeights`.
    """

    #: whether they take counts as a tensor, in a graph of ``torch.compile``
    fits_graphs = True

    def __init__(
        self,
        embed_dim: int,
        ffn_dim: int,
        max_tokens: int,
        expert_ids: Sequence[int],
        activation: str,
        weight_bound: float,
        experts_per_token: int = 1,
        is_toeplitz: bool = False,
        average: float = 0.0,
        num_all: int | None = None,
    ) -> None:
        super().__init__()
        num_local = len(expert_ids)
        self.expert_ids = expert_ids
        self.experts_per_token = experts_per_token
        self.activation = activation
        self.norm_weight = nn.Parameter(torch.ones(num_local, embed_dim))
        self.norm_bias = nn.Parameter(torch.zeros(num_local, embed_dim))
        self.w_in = uniform_rows(expert_ids, ffn_dim, embed_dim, bound=xavier_bound(embed_dim, ffn_dim))
        self.b_in = nn.Parameter(torch.zeros(num_local, ffn_dim))
        self.gate_norm_weight = nn.Parameter(torch.ones(num_local, ffn_dim // 2))
        self.gate_norm_bias = nn.Parameter(torch.zeros(num_local, ffn_dim // 2))
        self.gating = SpatialWeights(
            max_tokens, expert_ids, weight_bound, 1.0, is_toeplitz=is_toeplitz, average=average, num_all=num_all
        )
        self.w_out = uniform_rows(expert_ids, embed_dim, ffn_dim // 2, bound=xavier_bound(ffn_dim // 2, embed_dim))
        self.b_out = nn.Parameter(torch.zeros(num_local, embed_dim))

    def forward(
        self,
        x_AH: Tensor,
        counts: Sequence[int] | Tensor,
        place_A2: Tensor,
        num_seqs: int,
        context: ForwardContext,
        chosen_NE: Tensor | None = None,
    ) -> Tensor:
        """Send each token through its expert.

        Args:
            x_AH: tokens sorted by expert, (A, H).
            counts: tokens of each expert; a tensor (e,) in a graph of ``torch.compile``, which does not know them.
            place_A2: sequence and absolute position of each token, (A, 2).
            num_seqs: S, sequences among which the tokens are, those of other ranks included.
            context: for incremental decoding.
            chosen_NE: which tokens the router sends to each expert, where every expert gets all N tokens so that
                shapes are fixed.

        Returns:
            (A, H).
        """
        inner = [self.norm_weight, self.norm_bias, self.w_in, self.b_in, self.gate_norm_weight, self.gate_norm_bias]
        outer = [self.w_out, self.b_out]
        if isinstance(counts, Tensor):
            weights = [*inner, *outer, self.gating.matrices(), self.gating.bias]
            return torch.ops.smlp.gated_mlps(x_AH, counts, place_A2, num_seqs, weights, self.activation)
        counts = list(counts)
        gated, keys = _gated(x_AH, counts, inner, self.activation)
        if chosen_NE is not None:  # what is left out adds nothing to the sums over positions
            keys_NEC = torch.stack(keys, dim=1) * chosen_NE.unsqueeze(2)
            gates = self.gating.project(keys_NEC.unflatten(0, (num_seqs, -1))).flatten(0, 1).unbind(1)
            return torch.cat([linear(z1 * gate, *proj) for z1, gate, *proj in _each(gated, gates, *outer)])
        seen = list(zip(place_A2.split(counts), keys, strict=True))
        if context.state is not None:
            seen = self._remember(torch.cat(keys), place_A2, counts, context)
        spatial = (self.gating.matrices(), self.gating.bias)
        return _projected(gated, seen, place_A2.split(counts), num_seqs, *outer, *spatial)

    def _remember(
        self, key_AC: Tensor, place_A2: Tensor, counts: list[int], context: ForwardContext
    ) -> list[tuple[Tensor, Tensor]]:
        """Return, for each expert, the positions and gating features of all its tokens so far, in order."""
        sequence_A, step_A = place_A2[:, 0], place_A2[:, 1] - context.start
        num_seqs, num_new, num_each = context.num_seqs, context.num_new_tokens, self.experts_per_token
        # column: rank of the expert among its token's choices; value: 1 + the expert's row, or 0 for none
        rank_A = slots(sequence_A * num_new + step_A, num_seqs * num_new)
        owner_A = torch.arange(1, len(counts) + 1, device=key_AC.device).repeat_interleave(
            torch.tensor(counts, device=key_AC.device)
        )
        key_BnKC = key_AC.new_zeros(num_seqs, num_new, num_each, key_AC.size(1))
        key_BnKC[sequence_A, step_A, rank_A] = key_AC
        owner_BnK = owner_A.new_zeros(num_seqs, num_new, num_each)
        owner_BnK[sequence_A, step_A, rank_A] = owner_A
        state, max_tokens = context.state, self.gating.max_tokens
        assert state is not None
        key_BmKC = state.append((self, "keys"), key_BnKC.flatten(2), max_tokens).unflatten(2, (num_each, -1))
        owner_BmK = state.append((self, "owners"), owner_BnK, max_tokens)
        found = [(owner_BmK == owner).nonzero() for owner in range(1, len(counts) + 1)]
        return [(place[:, :2], key_BmKC[place[:, 0], place[:, 1], place[:, 2]]) for place in found]


def _each(*values: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield what belongs to one expert after the other.

    Unbound weights give one stacked gradient in the backward pass instead of one full-size gradient per expert.
    """
    return zip(*(value.unbind() if isinstance(value, Tensor) else value for value in values), strict=True)


def _gated(
    x_AH: Tensor, counts: list[int], weights: Sequence[Tensor], activation: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Return each expert's gated halves and normed keys, from the weights of its norm, ``U`` and the gate's norm."""
    gated, keys = [], []
    for x, gain, offset, weight, bias, gate_gain, gate_offset in _each(x_AH.split(counts), *weights):
        x = F.layer_norm(x, x.shape[1:], gain, offset)
        z1, z2 = activated_halves(linear(x, weight, bias), activation)
        gated.append(z1)
        keys.append(F.layer_norm(z2, z2.shape[1:], gate_gain, gate_offset))
    return gated, keys


def _projected(
    gated: Sequence[Tensor],
    seen: Sequence[tuple[Tensor, Tensor]],
    places: Sequence[Tensor],
    num_seqs: int,
    *weights: Tensor,
) -> Tensor:
    """Return the outputs of all experts, (A, H), from the places and features of each expert's keys (``seen``) and the
    weights of ``V`` and the spatial projections."""
    outputs = []
    for z1, place, (key_place, key), weight, bias, weight_TT, bias_T in _each(gated, places, seen, *weights):
        gate = sparse_spatial_projection(place, key_place, key, weight_TT, bias_T, num_seqs)
        outputs.append(linear(z1 * gate, weight, bias))
    return torch.cat(outputs)


# Two operators for graphs of torch.compile, in which the numbers of tokens are not known.
_ARGUMENTS = "Tensor x, Tensor counts, Tensor places, SymInt num_seqs, Tensor[] weights, str activation"


def _op(
    x_AH: Tensor, counts_e: Tensor, place_A2: Tensor, num_seqs: int, weights: Sequence[Tensor], activation: str
) -> Tensor:
    counts = counts_e.tolist()
    gated, keys = _gated(x_AH, counts, weights[:6], activation)
    places = place_A2.split(counts)
    return _projected(gated, list(zip(places, keys, strict=True)), places, num_seqs, *weights[6:])


def _gradients_op(grad_AH: Tensor, x_AH: Tensor, *rest: Any) -> list[Tensor]:
    """Return the gradients of tokens and weights; computes the outputs again, to differentiate them."""
    counts_e, place_A2, num_seqs, weights, activation = rest
    given = [value.detach().requires_grad_() for value in (x_AH, *weights)]
    with torch.enable_grad():
        out_AH = _op(given[0], counts_e, place_A2, num_seqs, given[1:], activation)
    return list(torch.autograd.grad(out_AH, given, grad_AH, allow_unused=True, materialize_grads=True))


def _fake_gradients(grad_AH: Tensor, x_AH: Tensor, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(value) for value in (x_AH, *rest[-2])]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_AH, counts_e, place_A2, ctx.num_seqs, weights, ctx.activation = inputs
    ctx.save_for_backward(x_AH, counts_e, place_A2, *weights)


def _backward(ctx: Any, grad_AH: Tensor) -> tuple[Any, ...]:
    x_AH, counts_e, place_A2, *weights = ctx.saved_tensors
    given = (x_AH, counts_e, place_A2, ctx.num_seqs, weights, ctx.activation)
    grad_x_AH, *of_weights = torch.ops.smlp.gated_mlps_gradients(grad_AH, *given)
    return grad_x_AH, None, None, None, of_weights, None


_NAME = add_operator(f"smlp::gated_mlps({_ARGUMENTS}) -> Tensor", _op, lambda x_AH, *rest: torch.empty_like(x_AH))
add_operator(f"{_NAME}_gradients(Tensor grad, {_ARGUMENTS}) -> Tensor[]", _gradients_op, _fake_gradients)
torch.library.register_autograd(_NAME, _backward, setup_context=_keep)


class PlacedTokenMoE(TokenMoE):
    """A tMoE whose experts mix the tokens of a sequence and therefore receive the tokens' positions."""

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, AuxLosses]:
        """Return the update (B, n, H) to add to x, and the router's auxiliary losses.

        Raises:
            UserError: incremental decoding with experts that are spread over ranks.
        """
        if context.state is not None and self.dispatcher.num_ranks > 1:
            raise UserError(
                f"{self.name}: text can be generated token by token only if each rank holds all experts: load "
                "the model with an expert-parallel size of 1"
            )
        if context.state is not None:  # the operator in graphs remembers nothing
            return self._chain_outside_graphs(x_BnH, context)
        return super().forward(x_BnH, context)

    def _beside_tokens(self, rows_N: Tensor | None, record: Any, context: ForwardContext) -> tuple[Any, ...]:
        """Return the arguments of :meth:`GatedMLPExperts.forward` from ``place_A2`` on."""
        if rows_N is None:
            rows_N = torch.arange(record.plan.num_tokens, device=record.plan.token_A.device)
        sequence_N = rows_N.div(context.num_new_tokens, rounding_mode="floor")
        place_N2 = torch.stack([sequence_N, rows_N % context.num_new_tokens + context.start], dim=1)
        if needs_fixed_shapes():
            plan = record.plan
            experts = torch.arange(plan.num_experts, device=rows_N.device)
            expert_A = plan.expert_A if plan.kept_A is None else torch.where(plan.kept_A, plan.expert_A, -1)
            chosen_AE = (expert_A.unsqueeze(1) == experts).to(torch.uint8)
            chosen_NE = chosen_AE.new_zeros(plan.num_tokens, plan.num_experts).index_add(0, plan.token_A, chosen_AE)
            return place_N2, context.num_seqs, context, chosen_NE
        return (*self.dispatcher.dispatch_places(place_N2, context.num_seqs, record), context)


class GatedMLPMoEBlock(Block):
    """``x + MoE(x)``, whose experts are gMLP layers, each with a norm of its own."""

    def __init__(self, token_moe: PlacedTokenMoE, dropout: float) -> None:
        super().__init__()
        self.token_moe = token_moe
        self.dropout = Dropout(dropout)

    def forward(self, x_BnH: Tensor, context: ForwardContext) -> tuple[Tensor, AuxLosses]:
        if context.groups:
            return x_BnH + context.by_sequences(lambda x, own: self.token_moe(x, own)[0], x_BnH), {}
        update_BnH, aux_losses = self.token_moe(x_BnH, context)
        return x_BnH + self.dropout(update_BnH), aux_losses


def gated_mlp_moe(config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> PlacedTokenMoE:
    """Build the layer, with the experts of this rank; with all of them by default."""
    ranks, name = ranks or one_process(config.num_experts), f"layer {layer_index} (gMLP-MoE)"
    experts = GatedMLPExperts(
        config.embed_dim,
        config.ffn_dim,
        config.max_tokens,
        ranks.layout.expert_ids,
        config.activation,
        config.spatial_weight_bound,
        config.experts_per_token,
        config.spatial_weights == "toeplitz",
        config.spatial_init_average,
        config.num_experts,
    )
    router = config.router_kind.build(config.for_router(layer_index))
    return PlacedTokenMoE(router, experts, name, token_dispatcher(ranks, name))


@register_sparse_block("gmlp_moe")
class GatedMLPMoE(BlockKind):
    """gMLP layers as experts of tokens."""

    has_spatial_weights = True
    keeps_sequences_whole = True

    def check(self, config: ModelConfig) -> None:
        check_halves(config)

    def attends(self, config: ModelConfig) -> bool:
        return False

    def build(self, config: ModelConfig, layer_index: int, ranks: Ranks | None = None) -> Block:
        return GatedMLPMoEBlock(gated_mlp_moe(config, layer_index, ranks), config.tmoe_dropout)

    def components(self, config: ModelConfig, layer_index: int, num_tokens: int) -> Iterable[Component]:
        H, F, T = config.embed_dim, config.ffn_dim, config.max_tokens
        E, half = config.num_experts, F // 2
        norms = 2 * H + 2 * half
        spatial = spatial_parameters(T, True, config.spatial_weights == "toeplitz")
        yield from router_costs(config, layer_index)
        yield Component(
            f"blocks.{layer_index}",
            layer_index,
            GATED_MLP_EXPERTS,
            expert_params=norms + linear_parameters(H, F) + spatial + T + linear_parameters(half, H),
            num_experts=E,
            flops_per_assignment=LAYER_NORM_FLOPS * (H + half) + H * F + half * H,
            assignments_per_token=min(config.experts_per_token, E),
            flops_per_pair=half,
        )

    def activations_per_position(self, config: ModelConfig) -> float:
        width, hidden = config.embed_dim, config.ffn_dim
        keys = config.experts_per_token * config.max_tokens / config.num_experts
        # for each choice: input, normed input, input and output of the activation; key, gate and their product;
        # the spatial weights of its keys and their causal mask; the output, which a routing weight multiplies
        each = 2 * width + 2 * hidden + 3 * hidden / 2 + 1.25 * keys + width
        return width + config.experts_per_token * each + dropout_keeps(config, config.tmoe_dropout)

    def ffn_multiple(self, config: ModelConfig) -> int:
        return 2 * config.num_heads
