"""Parameters and FLOPs of every component of a model, by formula.

The convention is fvcore's, with which the paper counts (Yu et al., 2022, section 4.1): forward pass only; one
multiply-add is 1 and a layer norm 5 per element; attention and spatial projections are counted as the dense products
that they are computed as, not as their causal half, unless that is asked for; biases, activations, softmax, gating and
residuals are 0. "Nominal" means that every token reaches the k experts that it is due and that their loads are equal.

The work of training (:func:`training_work`) is what is compared with the rate of a device: six operations for each
multiply-add, two in the forward pass and four in the backward pass, which computes the gradients of both factors. Only
the causal half of spatial projections and attention counts, the diagonal included, whatever is computed. What
activation checkpointing computes a second time does not count.

Letters: ``T`` context, ``n`` tokens of an input (n <= T), ``H``, ``F``, ``V``, ``E`` experts of which each token is due
``k``, ``P`` prefix, ``W`` ranks.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from smlp.config import ModelConfig
from smlp.config.registry import DENSE_BLOCKS, SPARSE_BLOCKS
from smlp.costs.component import LAYER_NORM_FLOPS, NORMS, OUTPUT, PROJECTIONS, Component, linear_parameters
from smlp.errors import UserError

#: ranks (GPUs) that the paper trains every model on (Yu et al., 2022, appendix C.2)
PAPER_WORLD_SIZE = 32

EMBEDDING = "embedding and head"
MASKED_HEAD = "masked LM head"
#: share of positions that a masked language model predicts (Devlin et al., 2019)
MASKED_SHARE = 0.15


def num_masked(num_tokens: int) -> int:
    """Return the nominal number of positions that a masked language model predicts in a sequence of n."""
    return max(1, round(MASKED_SHARE * num_tokens))


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters."""

    #: parameters of the experts on one rank
    expert_per_rank: int
    #: parameters that every rank holds
    other: int
    #: parameters of the whole model, each expert counted once
    total: int


def components(config: ModelConfig, num_tokens: int | None = None) -> list[Component]:
    """Return all components in the order of the stack, for inputs of ``num_tokens`` (n, default T) tokens.

    Raises:
        UserError: ``num_tokens`` is not in 1 .. T.
    """
    n = config.max_tokens if num_tokens is None else num_tokens
    if not 1 <= n <= config.max_tokens:
        raise UserError(f"num_tokens={n} must be between 1 and max_tokens={config.max_tokens}")
    sparse = set(config.sparse_layer_indices())
    parts = list(_embedding(config, n))
    for layer in range(config.num_layers):
        kind = SPARSE_BLOCKS[config.sparse_block] if layer in sparse else DENSE_BLOCKS[config.dense_block]
        try:
            parts += kind.components(config, layer, n)
        except TypeError as error:
            raise UserError(f"layer {layer}: components() of the block returned no Components: {error}") from error
    return parts


def flops_per_token(config: ModelConfig, num_tokens: int | None = None) -> float:
    """Return the nominal multiply-adds of a token's forward pass, in sequences of n (default T) tokens."""
    n = num_tokens or config.max_tokens
    return sum(part.nominal_flops(n) for part in components(config, num_tokens))


def forward_flops(config: ModelConfig, num_seqs: int = 1, num_tokens: int | None = None) -> int:
    """Return the nominal multiply-adds of the forward pass of B sequences of n (default T) tokens."""
    return round(num_seqs * (num_tokens or config.max_tokens) * flops_per_token(config, num_tokens))


def default_world_size(config: ModelConfig) -> int:
    """Return the paper's 32 ranks if the experts can be shared out evenly among them, else a rank for each expert."""
    num_experts = config.num_experts
    return num_experts if config.num_sparse_layers and num_experts % PAPER_WORLD_SIZE else PAPER_WORLD_SIZE


def experts_per_rank(config: ModelConfig, world_size: int | None = None) -> int:
    """Return how many experts of each layer live on one of W ranks (default: :func:`default_world_size`).

    With no more ranks than experts that is E/W; with more, groups of E ranks hold one expert each. 0 without experts.

    Raises:
        UserError: neither number divides the other.
    """
    world_size = default_world_size(config) if world_size is None else world_size
    if world_size < 1:
        raise UserError(f"world_size must be at least 1, got {world_size}")
    if not config.num_sparse_layers:
        return 0
    num_experts = config.num_experts
    if num_experts % world_size and world_size % num_experts:
        raise UserError(
            f"{num_experts} experts cannot be divided among world_size={world_size} ranks: "
            "one number must divide the other"
        )
    return max(num_experts // world_size, 1)


def parameters(config: ModelConfig, world_size: int | None = None) -> Parameters:
    """Return the numbers of parameters on W ranks; arguments and errors as in :func:`experts_per_rank`."""
    parts = components(config)
    expert, other = sum(part.expert_params for part in parts), sum(part.other_params for part in parts)
    per_rank = experts_per_rank(config, world_size) * expert
    return Parameters(per_rank, other, other + config.num_experts * expert)


def _embedding(config: ModelConfig, num_tokens: int) -> Iterator[Component]:
    """Yield the costs of the tied embedding, learnt positions, norms outside the blocks, and of an encoder's head.

    An encoder's output is computed for masked positions only, see :func:`num_masked`.
    """
    H, V = config.embed_dim, config.vocab_size
    positions = config.max_tokens * H if config.positions == "learned" else 0
    norms = 1 + config.has_embedding_norm
    asked = num_masked(num_tokens) / num_tokens if config.is_bidirectional else 1
    yield Component(
        root_of(config),
        None,
        EMBEDDING,
        other_params=V * H + positions + norms * 2 * H,
        work={OUTPUT: asked * V * H, NORMS: norms * LAYER_NORM_FLOPS * H},
    )
    if config.is_bidirectional:
        yield Component(
            "head",
            None,
            MASKED_HEAD,
            other_params=linear_parameters(H, H) + 2 * H + V,
            work={PROJECTIONS: asked * H * H, NORMS: asked * LAYER_NORM_FLOPS * H},
        )


def root_of(config: ModelConfig) -> str:
    """Return the name of the component that is the whole model without its named parts."""
    return "encoder" if config.is_bidirectional else "decoder"


_PER_MULTIPLY_ADD = 2 * 3


@functools.lru_cache(maxsize=64)
def training_work(config: ModelConfig, num_tokens: int | None = None) -> Mapping[str, float]:
    """Return the operations of both passes for each token in sequences of n (default T) tokens, by kind of work.

    Of products over positions only the causal half counts, except in encoders, all of whose positions see each other.

    Raises:
        UserError: ``num_tokens`` is not in 1 .. T.
    """
    work: Counter[str] = Counter()
    for part in components(config, num_tokens):
        work.update(part.nominal_work(num_tokens or config.max_tokens, causal=not config.is_bidirectional))
    return MappingProxyType({kind: _PER_MULTIPLY_ADD * flops for kind, flops in work.items()})


def training_flops(config: ModelConfig, num_tokens: int | None = None) -> float:
    """Return the sum of :func:`training_work`."""
    return sum(training_work(config, num_tokens).values())
