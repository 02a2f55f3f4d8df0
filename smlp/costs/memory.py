"""Memory of a training update on one rank, by formula.

What an update holds: weights, a gradient and two moments for each (Adam), and what the forward pass keeps for the
backward pass. The last is counted here for each position, in numbers of the training type (4 bytes each in fp32),
if every token reaches its k experts, all sequences have T tokens and nothing is recomputed. Numbers that do not grow
with H, F, V or E are left out, except the two of each layer norm.

Letters: ``H``, ``F``, ``V``, ``E`` experts of which each token is due ``k``, ``P`` prefix, ``T`` context.
"""

from __future__ import annotations

from dataclasses import dataclass

from smlp.config import ModelConfig
from smlp.config.registry import DENSE_BLOCKS, SPARSE_BLOCKS
from smlp.costs.component import LAYER_NORM_KEEPS, dropout_keeps
from smlp.costs.formula import parameters
from smlp.errors import UserError
from smlp.launch.machine import memory_bytes


@dataclass(frozen=True)
class UpdateMemory:
    """Bytes of each kind."""

    weights: int
    gradients: int
    moments: int
    activations: int

    @property
    def total(self) -> int:
        """Return the sum of all kinds."""
        return self.weights + self.gradients + self.moments + self.activations


def update_memory(config: ModelConfig, num_positions: int, world_size: int = 1, bytes_each: int = 4) -> UpdateMemory:
    """Return the memory of an update with Adam.

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


def check_weights(config: ModelConfig, world_size: int = 1) -> None:
    """Refuse a model whose weights alone take more memory than this machine has, before they are allocated.

    Args:
        config: the model.
        world_size: ranks over which the experts are spread.

    Raises:
        UserError: the message has the sizes.
    """
    needed, present = _weight_bytes(config, world_size), memory_bytes()
    if needed > present:
        raise UserError(
            f"the weights of this model take {needed / 2**30:,.0f} GiB, and this machine has a memory of "
            f"{present / 2**30:,.0f} GiB ({_sizes(config)}, {config.vocab_size} symbols)"
        )


def _weight_bytes(config: ModelConfig, world_size: int) -> int:
    """Return the bytes of one rank's weights in float32."""
    own = parameters(config, world_size)
    return 4 * (own.expert_per_rank + own.other)


def _sizes(config: ModelConfig) -> str:
    return (
        f"--embed-dim {config.embed_dim}, --ffn-dim {config.ffn_dim}, {config.num_layers} layers, a context of "
        f"{config.max_tokens} tokens"
    )


def check_training(config: ModelConfig, world_size: int = 1) -> None:
    """Refuse to train on a CPU a model whose weights, gradients and moments of Adam take more memory than there is.

    Args:
        config: the model.
        world_size: ranks over which the experts are spread.

    Raises:
        UserError: the message has the sizes.
    """
    weights, present = _weight_bytes(config, world_size), memory_bytes()
    total = 4 * weights  # weight, gradient and two moments
    if total > present:
        raise UserError(
            f"the weights of this model take {weights / 2**30:,.0f} GiB, with gradients and moments of Adam "
            f"{total / 2**30:,.0f} GiB, and this machine has a memory of {present / 2**30:,.0f} GiB "
            f"({_sizes(config)})"
        )


def activations_per_position(config: ModelConfig) -> float:
    """Return how many numbers are kept for the backward pass for each position.

    Raises:
        UserError: a block of a plug-in does not say.
    """
    sparse = set(config.sparse_layer_indices())
    blocks = sum(
        (
            SPARSE_BLOCKS[config.sparse_block] if layer in sparse else DENSE_BLOCKS[config.dense_block]
        ).activations_per_position(config)
        for layer in range(config.num_layers)
    )
    # input of each norm outside the blocks, output of the last one, and logits
    norms = 1 + config.has_embedding_norm
    head = (1 + norms) * config.embed_dim + norms * LAYER_NORM_KEEPS + config.vocab_size
    return dropout_keeps(config) + blocks + head
