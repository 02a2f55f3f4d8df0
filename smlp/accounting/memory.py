"""Memory of a training update on one rank, by formula; needs no torch.

What an update holds: weights, a gradient and two moments for each (Adam), and what the forward pass keeps for the
backward pass. The last is counted here for each position, in numbers of the training type (4 bytes each in fp32),
where every token reaches its k experts, all sequences have T tokens and nothing is recomputed. Numbers that do not grow
with H, F, V or E are left out, but for the two of each layer norm.

Letters: ``H``, ``F``, ``V``, ``E`` experts of which each token is due ``k``, ``P`` prefix, ``T`` context.
"""

from __future__ import annotations

from dataclasses import dataclass

from smlp.accounting.formula import parameters
from smlp.config import ModelConfig

#: a layer norm keeps its input, and mean and deviation of each position
_NORM = 2


@dataclass(frozen=True)
class UpdateMemory:
    """Bytes of each kind."""

    weights: int
    gradients: int
    moments: int
    activations: int

    @property
    def total(self) -> int:
        """All of them together."""
        return self.weights + self.gradients + self.moments + self.activations


def update_memory(config: ModelConfig, num_positions: int, world_size: int = 1, bytes_each: int = 4) -> UpdateMemory:
    """Memory of an update with Adam.

    Args:
        config: the model.
        num_positions: positions of one rank's batch, before ``--update-freq``.
        world_size: W, ranks over which the experts are spread.
        bytes_each: of a number in the training type; moments have 4.
    """
    own = parameters(config, world_size)
    numbers = own.expert_per_rank + own.other
    kept = round(bytes_each * num_positions * activations_per_position(config))
    return UpdateMemory(bytes_each * numbers, bytes_each * numbers, 8 * numbers, kept)


def activations_per_position(config: ModelConfig) -> float:
    """Numbers kept for the backward pass for each position."""
    sparse = set(config.sparse_layer_indices())
    blocks = sum(
        _sparse_block(config) if layer in sparse else _dense_block(config) for layer in range(config.num_layers)
    )
    # the norm's input and output, and log-probabilities
    head = 2 * config.embed_dim + _NORM + config.vocab_size
    return _mask(config) + blocks + head


def _mask(config: ModelConfig) -> int:
    return config.embed_dim if config.dropout else 0


def _dense_block(config: ModelConfig) -> float:
    if config.dense_block == "transformer":
        return _attention(config) + _mask(config) + 2 * config.embed_dim + _NORM + 2 * config.ffn_dim + _mask(config)
    # the norm's input and output, before and after the activation, normed half, gate, product
    return 2 * config.embed_dim + 2 * _NORM + 3.5 * config.ffn_dim + _mask(config)


def _sparse_block(config: ModelConfig) -> float:
    if config.sparse_block == "gmlp_moe":
        return _gated_experts(config) + _mask(config)
    mixing = _features(config) if config.sparse_block == "smlp" else _attention(config)
    return mixing + _mask(config) + _token_experts(config) + _mask(config)


def _attention(config: ModelConfig) -> float:
    # the norm's input and output, queries, keys and values, what they give, the sum of each softmax
    return 6 * config.embed_dim + _NORM + config.num_heads


def _features(config: ModelConfig) -> float:
    width, share = config.embed_dim, 1 - config.prefix_tokens / config.max_tokens
    # the norms' inputs, the second one's output in the experts' order, gates
    if config.moe.feature_routing == "deterministic":
        return 4 * width + 2 * _NORM
    # the norms' inputs, what the router reads, and after the prefix: sorted features, gates, and their products
    return 2 * width + 2 * _NORM + (1 - share) * width + share * 3 * width


def _token_experts(config: ModelConfig) -> float:
    moe, width = config.moe, config.embed_dim
    # for each choice the expert's input and what goes into its activation
    kept = moe.experts_per_token * (width + config.ffn_dim)
    if moe.router != "base":
        kept += width + _NORM  # what goes into the norm before
    if moe.router != "hash":
        kept += width + moe.experts_per_token * width  # what is routed; outputs, which weights multiply
    return kept + (moe.num_experts if moe.router in ("switch", "gshard") else 0)


def _gated_experts(config: ModelConfig) -> float:
    moe, width, hidden = config.moe, config.embed_dim, config.ffn_dim
    keys = moe.experts_per_token * config.max_tokens / moe.num_experts
    # for each choice: input, normed input, before and after the activation; key, gate, and the product with it; the
    # weights that are picked for its keys, and which of them are earlier ones; the output, which a weight multiplies
    each = 2 * width + 2 * hidden + 3 * hidden / 2 + 1.25 * keys + width
    return width + moe.experts_per_token * each
