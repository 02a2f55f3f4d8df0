"""The decoder: embedding, blocks, final layer norm and the tied output.

Letters: ``B`` sequences, ``n`` tokens (n <= T), ``T`` context, ``H`` width, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smlp.config import ModelConfig
from smlp.config.presets import preset
from smlp.costs.memory import check_weights
from smlp.errors import UserError
from smlp.moe.layer import TokenMoE
from smlp.nn.blocks.base import AuxLosses, Block, build_blocks
from smlp.nn.layers import Dropout
from smlp.nn.state import DecodingState, ForwardContext, pytree
from smlp.ops import linear
from smlp.parallel import Ranks
from smlp.parallel.spans import EMBEDDING, LOGITS, span


@pytree
@dataclass(frozen=True)
class DecoderOutput:
    """Result of one forward pass."""

    #: next-token logits, (B, n, V)
    logits: Tensor
    #: scalar losses to add to the training loss, by name; layers of a kind are summed
    aux_losses: AuxLosses


class Decoder(nn.Module):
    """A decoder-only language model; every architecture is a choice of blocks.

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
                nn.init.normal_(self.positions, std=config.embed_dim**-0.5)
        self.dropout = Dropout(config.dropout)
        self.blocks = build_blocks(config, ranks)
        self.norm = nn.LayerNorm(config.embed_dim)

    def forward(
        self,
        tokens_Bn: Tensor,
        state: DecodingState | None = None,
        context: ForwardContext | None = None,
    ) -> DecoderOutput:
        """Return next-token logits.

        Args:
            tokens_Bn: ids (B, n). Padding may stand on the right only; it is never routed and changes no other logit.
                B may be 0, on a rank that has no batch but experts that the others' tokens need.
            state: for incremental decoding; ``tokens_Bn`` are then the tokens after those it has seen.
            context: to read or to fix routing decisions; made anew by default.

        Raises:
            UserError: the sequence, with what ``state`` has seen, is longer than ``max_tokens``; or, in training, no
                longer than ``prefix_tokens``.
            NaNError: routing scores are NaN; the message names the layer.
        """
        x_BnH, aux_losses = self.features(tokens_Bn, state, context)
        return DecoderOutput(self.project(x_BnH), aux_losses)

    def features(
        self,
        tokens_Bn: Tensor,
        state: DecodingState | None = None,
        context: ForwardContext | None = None,
    ) -> tuple[Tensor, AuxLosses]:
        """Return final hidden states (B, n, H) and auxiliary losses; arguments as in :meth:`forward`."""
        x_BnH, context = self._embedded(tokens_Bn, state, context)
        total: AuxLosses = {}
        recompute = self.config.checkpoint_activations and self.training and state is None
        for block in self.blocks:
            if recompute:
                x_BnH, aux_losses = checkpoint(block, x_BnH, context, use_reentrant=False)
            else:
                x_BnH, aux_losses = block(x_BnH, context)
            for name, loss in aux_losses.items():
                total[name] = total[name] + loss if name in total else loss
        if state is not None:
            state.length += tokens_Bn.size(1)
        return self.norm(x_BnH), total

    def features_of(self, groups: Sequence[tuple[Tensor, DecodingState | None]]) -> Tensor:
        """Return the final hidden states of several groups of sequences at once, in evaluation.

        What works on one token after the other takes all groups together; only what mixes the tokens of a sequence
        takes one group after the other. So sequences of many lengths need little padding and few passes.

        Args:
            groups: ids (B, n), and the state after which they come, or None; each group has a B and an n of its own.

        Returns:
            (N, H): the positions of the first group's first sequence, of its second, ..., of the next group.

        Raises:
            UserError, NaNError: as :meth:`forward`.
        """
        x_1NH, context = self._embedded_groups(groups)
        for block in self.blocks:
            x_1NH, _ = block(x_1NH, context)
        _advance(groups)
        return self.norm(x_1NH)[0]

    def read(self, groups: Sequence[tuple[Tensor, DecodingState]]) -> None:
        """Read groups of sequences into their states, from which they can be continued.

        As :meth:`features_of`, but nothing is predicted, and so the last block has less to do.
        """
        x_1NH, context = self._embedded_groups(groups)
        *blocks, last = self.blocks
        for block in blocks:
            x_1NH, _ = block(x_1NH, context)
        cast(Block, last).read(x_1NH, context)
        _advance(groups)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
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

    def _embedded_groups(self, groups: Sequence[tuple[Tensor, DecodingState | None]]) -> tuple[Tensor, ForwardContext]:
        """Return the input of the first block, (1, N, H), and what travels beside it."""
        embedded, contexts = zip(*(self._embedded(tokens_Bn, state, None) for tokens_Bn, state in groups), strict=True)
        together = ForwardContext(groups=contexts)
        together.tokens_Bn = torch.cat([tokens_Bn.flatten() for tokens_Bn, _ in groups]).unsqueeze(0)
        together.valid_Bn = self._valid(together.tokens_Bn)
        return torch.cat([x_BnH.flatten(0, 1) for x_BnH in embedded]).unsqueeze(0), together

    def _embedded(
        self, tokens_Bn: Tensor, state: DecodingState | None, context: ForwardContext | None
    ) -> tuple[Tensor, ForwardContext]:
        """Return the input of the first block, (B, n, H), and what travels beside it."""
        start = state.length if state is not None else 0
        end = start + tokens_Bn.size(1)
        if end > self.config.max_tokens:
            raise UserError(
                f"sequence of {end} tokens is longer than the model's context of max_tokens={self.config.max_tokens}"
            )
        if state is not None:
            state.check(*tokens_Bn.shape)
        context = context or ForwardContext()
        context.state = state
        context.tokens_Bn = tokens_Bn
        prefix = self.config.prefix_tokens
        if self.training and tokens_Bn.size(0) and prefix and tokens_Bn.size(1) <= prefix:
            raise UserError(
                f"a sequence of {tokens_Bn.size(1)} tokens has none to learn from: the first "
                f"{prefix} only choose experts; give batches with longer sequences"
            )
        if not tokens_Bn.is_meta:
            context.valid_Bn = self._valid(tokens_Bn)
        with span(EMBEDDING):
            x_BnH = self.embedding(tokens_Bn)
            if self.config.positions != "none":
                x_BnH = x_BnH * math.sqrt(self.config.embed_dim) + self.positions[start:end].to(x_BnH.dtype)
            x_BnH = self.dropout(x_BnH)
        return x_BnH, context

    @property
    def needs_token_counts(self) -> bool:
        """Return whether routers wait for :meth:`balance_routers`, unless a checkpoint is loaded."""
        return self.config.num_sparse_layers > 0 and self.config.router_kind.needs_token_counts(self.config)

    def balance_routers(self, frequencies_V: Tensor) -> None:
        """Give routers that ask for it (``hash_kind=balanced``) the counts of the training data's tokens, (V,)."""
        if self.needs_token_counts:
            for module in self.modules():
                if isinstance(module, TokenMoE):
                    cast(Any, module.router).balance(frequencies_V)

    def _valid(self, tokens_Bn: Tensor) -> Tensor | None:
        """Return True at real tokens, (B, n), or None where there is no padding."""
        valid_Bn = tokens_Bn != self.config.padding_idx
        return None if valid_Bn.all() else valid_Bn

    def project(self, x_BnH: Tensor) -> Tensor:
        """Return the logits (B, n, V) of hidden states (B, n, H); the output matrix is the embedding."""
        with span(LOGITS):
            return linear(x_BnH, self.embedding.weight)


def _complete(decoder: Decoder, _: Any) -> None:
    """Compute the table of positions after a model on the meta device was given tensors (``assign=True``)."""
    if decoder.positions.is_meta:
        decoder._compute_positions(decoder.embedding.weight)


def _advance(groups: Sequence[tuple[Tensor, DecodingState | None]]) -> None:
    for tokens_Bn, state in groups:
        if state is not None:
            state.length += tokens_Bn.size(1)


def sinusoidal_positions(max_tokens: int, embed_dim: int) -> Tensor:
    """Return fixed position vectors (T, H): sines in the first half, cosines in the second (Vaswani et al., 2017).

    Computed on the CPU in float32, whatever torch's defaults are, so that a model always has the same ones.
    """
    half = embed_dim // 2
    number_f = torch.arange(half, dtype=torch.float32, device="cpu")
    frequency_f = torch.exp(number_f * -(math.log(10000.0) / max(half - 1, 1)))
    angle = torch.arange(max_tokens, device="cpu").unsqueeze(1) * frequency_f
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def build(arch: str, **overrides: Any) -> Decoder:
    """Build a decoder with random weights for a named architecture.

    Args:
        arch: a name of :data:`smlp.config.presets.PRESETS`, such as ``"smlp_tiny"``.
        **overrides: settings by name: fields of ``ModelConfig`` and ``MoEConfig``, such as ``num_experts=4``, and those
            that plugins bring (docs/extending.md).

    Raises:
        UserError: the name or a setting is unknown, a value is out of range, or the weights take more memory than this
            machine has.
    """
    config = preset(arch, **overrides)
    if torch.get_default_device().type == "cpu":
        check_weights(config)
    return Decoder(config)
