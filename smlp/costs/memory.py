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
    _check(config, world_size, is_trained=False)


def check_training(config: ModelConfig, world_size: int = 1) -> None:
    """Refuse to train on a CPU a model whose weights, gradients and moments of Adam take more memory than there is.

    Arguments and errors are those of :func:`check_weights`.
    """
    _check(config, world_size, is_trained=True)


def _check(config: ModelConfig, world_size: int, is_trained: bool) -> None:
    own = parameters(config, world_size)
    weights, present = 4 * (own.expert_per_rank + own.other), memory_bytes()  # in float32
    needed = 4 * weights if is_trained else weights  # weight, gradient and two moments
    if needed > present:
        more = f", with gradients and moments of Adam {needed / 2**30:,.0f} GiB" if is_trained else ""
        symbols = "" if is_trained else f", {config.vocab_size} symbols"
        raise UserError(
            f"the weights of this model take {weights / 2**30:,.0f} GiB{more}, and this machine has a memory of "
            f"{present / 2**30:,.0f} GiB (--embed-dim {config.embed_dim}, --ffn-dim {config.ffn_dim}, "
            f"{config.num_layers} layers, a context of {config.max_tokens} tokens{symbols})"
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
