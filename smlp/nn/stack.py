"""Base class of decoders and encoders: embedding, positions, blocks and the last layer norm.

Letters: ``B`` sequences, ``n`` tokens (n <= T), ``T`` context, ``H`` width, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.errors import UserError
from smlp.moe.routers import ExpertOffsets
from smlp.nn.blocks.base import AuxLosses, applied, build_blocks
from smlp.nn.layers import Dropout
from smlp.nn.state import ForwardContext
from smlp.ops import linear
from smlp.ops.fast_paths import is_traced
from smlp.parallel import Group, Ranks
from smlp.parallel.spans import EMBEDDING, LOGITS, span

_S = TypeVar("_S", bound="Stack")


class Stack(nn.Module):
    """Embedding, blocks and layer norm; every architecture is a choice of blocks.

    With the same random state, every rank of any layout starts from the same dense weights, and every expert from the
    same values wherever it lives.

    Args:
        config: of the whole model.
        ranks: who holds which experts; one process with all of them by default.

    Raises:
        UserError: ``ranks`` is for another number of experts.
    """

    positions: Tensor

    def __init__(self, config: ModelConfig, ranks: Ranks | None = None) -> None:
        super().__init__()
        if ranks is not None and config.num_sparse_layers and ranks.layout.num_experts != config.num_experts:
            raise UserError(
                f"the ranks are laid out for {ranks.layout.num_experts} experts, but num_experts is "
                f"{config.num_experts}"
            )
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim, padding_idx=config.padding_idx)
        std = config.embed_dim**-0.5 if config.embed_init_std is None else config.embed_init_std
        if not self.embedding.weight.is_meta:
            nn.init.normal_(self.embedding.weight, std=std)
            nn.init.zeros_(self.embedding.weight[config.padding_idx])
        if config.positions == "sinusoidal":
            self.register_buffer("positions", None, persistent=False)
            self._compute_positions(self.embedding.weight)
            self.register_load_state_dict_post_hook(_complete)
        elif config.positions == "learned":
            self.positions = nn.Parameter(torch.empty(config.max_tokens, config.embed_dim))
            if not self.positions.is_meta:
                nn.init.normal_(self.positions, std=std if config.is_bidirectional else config.embed_dim**-0.5)
        self.embedding_norm = nn.LayerNorm(config.embed_dim) if config.has_embedding_norm else None
        self.dropout = Dropout(config.dropout)
        self.blocks = build_blocks(config, ranks)
        #: follows the blocks; precedes them if their own norms follow the sublayers
        self.norm = nn.LayerNorm(config.embed_dim)

    def follow(self, progress: float) -> None:
        """Tell routers what share of the training is done, before an update; see ``router_freeze``, ``base_warmup``."""
        for module in self.modules():
            if follow := getattr(getattr(module, "router", None), "follow", None):
                follow(progress)

    def adjust_offsets(self, world: Group | None = None) -> None:
        """Move the offsets of routers by the loads since the last call; to be called once after each update.

        Args:
            world: all ranks, which call this together; one process by default.
        """
        offsets = [module for module in self.modules() if isinstance(module, ExpertOffsets)]
        if not offsets:
            return
        sums = torch.cat([each.take() for each in offsets])
        if world is not None:
            world.all_reduce(sums, "loads of experts")
        for each, part in zip(offsets, sums.split([each.value.numel() + 1 for each in offsets]), strict=True):
            each.adjust(part)

    def forget_loads(self) -> None:
        """Discard the loads since the last call of :meth:`adjust_offsets`, which then do not move the offsets."""
        for module in self.modules():
            if isinstance(module, ExpertOffsets):
                module.take()

    def _features(self, tokens_Bn: Tensor, context: ForwardContext) -> tuple[Tensor, AuxLosses]:
        """Return final hidden states (B, n, H) and auxiliary losses of ids (B, n)."""
        x_BnH = self._embedded(tokens_Bn, context)
        total: AuxLosses = {}
        recompute = self.config.checkpoint_activations and self.training and context.state is None
        for block in self.blocks:
            x_BnH, aux_losses = applied(block, x_BnH, context, recompute)
            for name, loss in aux_losses.items():
                total[name] = total[name] + loss if name in total else loss
        return self._normed(x_BnH), total

    def _normed(self, x_BnH: Tensor) -> Tensor:
        """Apply the last layer norm, unless the blocks end with one."""
        return x_BnH if self.config.layer_norm == "after" else self.norm(x_BnH)

    def _apply(self: _S, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _S:
        """Apply a function as torch does, and keep the table of sinusoidal positions right.

        No checkpoint holds the table, and :meth:`to_empty` makes a new tensor of it without values.
        """
        before = self._buffers.get("positions")
        super()._apply(fn, recurse)
        if before is not None and self.positions is not before:
            self._compute_positions(self.positions)
        return self

    def _compute_positions(self, like: Tensor) -> None:
        table = sinusoidal_positions(self.config.max_tokens, self.config.embed_dim)
        self.positions = table.to(like.device, like.dtype)

    def _embedded(self, tokens_Bn: Tensor, context: ForwardContext) -> Tensor:
        """Return the input of the first block, (B, n, H); put the ids and the padding mask into the context."""
        if not isinstance(tokens_Bn, Tensor) or tokens_Bn.dtype not in (torch.int64, torch.int32):
            found = f"one of {tokens_Bn.dtype}" if isinstance(tokens_Bn, Tensor) else f"{tokens_Bn!r:.80}"
            raise UserError(f"ids must be a tensor of int64 or int32, got {found}")
        if tokens_Bn.dim() != 2:
            raise UserError(f"ids must have the shape (batch, length), got {tuple(tokens_Bn.shape)}")
        if tokens_Bn.is_meta and not self.embedding.weight.is_meta:  # torch would go on, without values
            raise UserError(f"ids are on the device meta, the model is on {self.embedding.weight.device}")
        start = context.start
        end = start + tokens_Bn.size(1)
        if end > self.config.max_tokens:
            raise UserError(
                f"sequence of {end} tokens is longer than the model's context of max_tokens={self.config.max_tokens}"
            )
        if context.state is not None:
            context.state.check(*tokens_Bn.shape)
        context.tokens_Bn = tokens_Bn
        prefix = self.config.prefix_tokens
        if self.training and tokens_Bn.size(0) and prefix and tokens_Bn.size(1) <= prefix:
            raise UserError(
                f"a sequence of {tokens_Bn.size(1)} tokens leaves none to train on: the first "
                f"{prefix} only choose experts; give batches with longer sequences"
            )
        if not tokens_Bn.is_meta:
            context.valid_Bn = self._valid(tokens_Bn)
        with span(EMBEDDING):
            try:
                x_BnH = self.embedding(tokens_Bn)
            except IndexError:
                raise UserError(
                    f"ids must be from 0 to {self.config.vocab_size - 1}, got {tokens_Bn.min()} to {tokens_Bn.max()}"
                ) from None
            scale = self.config.embed_scale
            if scale != 1:
                x_BnH = x_BnH * scale
            if self.config.positions != "none":
                x_BnH = x_BnH + self.positions[start:end].to(x_BnH.dtype)
            if self.embedding_norm is not None:
                x_BnH = self.embedding_norm(x_BnH)
            elif self.config.layer_norm == "after":
                x_BnH = self.norm(x_BnH)
            x_BnH = self.dropout(x_BnH)
        return x_BnH

    def _valid(self, tokens_Bn: Tensor) -> Tensor | None:
        """Return True at real tokens, (B, n), or None where there is no padding; where torch traces, never None."""
        valid_Bn = tokens_Bn != self.config.padding_idx
        return None if not is_traced() and valid_Bn.all() else valid_Bn

    def project(self, x_BnH: Tensor) -> Tensor:
        """Return the logits (B, n, V) of hidden states (B, n, H); the output matrix is the embedding."""
        with span(LOGITS):
            return linear(x_BnH, self.embedding.weight)


def _complete(stack: Stack, _: Any) -> None:
    """Compute the table of positions after a model on the meta device was given tensors (``assign=True``)."""
    if stack.positions.is_meta:
        stack._compute_positions(stack.embedding.weight)


def sinusoidal_positions(max_tokens: int, embed_dim: int) -> Tensor:
    """Return fixed position vectors (T, H): sines in the first half, cosines in the second (Vaswani et al., 2017).

    Computed on the CPU in float32, whatever torch's defaults are, so that a model always has the same ones.
    """
    half = embed_dim // 2
    number_f = torch.arange(half, dtype=torch.float32, device="cpu")
    frequency_f = torch.exp(number_f * -(math.log(10000.0) / max(half - 1, 1)))
    angle = torch.arange(max_tokens, device="cpu").unsqueeze(1) * frequency_f
    return torch.cat([angle.sin(), angle.cos()], dim=1)
