"""The decoder: a language model whose positions see earlier ones only; its output is tied to the embedding.

Letters: ``B`` sequences, ``n`` tokens (n <= T), ``T`` context, ``H`` width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from smlp.config import ModelConfig
from smlp.errors import UserError
from smlp.moe.layer import TokenMoE
from smlp.nn.blocks.base import AuxLosses, Block, applied
from smlp.nn.stack import Stack
from smlp.nn.state import DecodingState, ForwardContext, pytree
from smlp.parallel import Ranks


@pytree
@dataclass(frozen=True)
class DecoderOutput:
    """Result of one forward pass."""

    #: next-token logits, (B, n, V)
    logits: Tensor
    #: scalar losses to add to the training loss, by name, summed over layers
    aux_losses: AuxLosses


class Decoder(Stack):
    """A decoder-only language model.

    Args:
        config: of the whole model.
        ranks: who holds which experts; one process with all of them by default.

    Raises:
        UserError: ``ranks`` is for another number of experts, or the configuration is that of an encoder.
    """

    def __init__(self, config: ModelConfig, ranks: Ranks | None = None) -> None:
        if config.is_bidirectional:
            raise UserError(f"direction={config.direction} makes an encoder, which does not predict next tokens")
        super().__init__(config, ranks)

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
        context = context or ForwardContext()
        context.state = state
        features = self._features(tokens_Bn, context)
        if state is not None:
            state.length += tokens_Bn.size(1)
        return features

    def features_of(self, groups: Sequence[tuple[Tensor, DecodingState | None]]) -> Tensor:
        """Return the final hidden states of several groups of sequences at once, in evaluation.

        Functions of single tokens process all groups together; only those that mix the tokens of a sequence process one
        group after the other. Sequences of many lengths therefore need little padding and few passes.

        Args:
            groups: ids (B, n), and the state after which they come, or None; each group has a B and an n of its own.

        Returns:
            (N, H): the positions of the first group's first sequence, of its second, ..., of the next group.

        Raises:
            UserError, NaNError: as :meth:`forward`.
        """
        x_1NH, context = self._embedded_groups(groups)
        for block in self.blocks:
            x_1NH, _ = applied(block, x_1NH, context)
        _advance(groups)
        return self._normed(x_1NH)[0]

    def read(self, groups: Sequence[tuple[Tensor, DecodingState]]) -> None:
        """Read groups of sequences into their states, from which they can be continued.

        As :meth:`features_of`, but nothing is predicted, and so the last block has less to do.
        """
        x_1NH, context = self._embedded_groups(groups)
        *blocks, last = self.blocks
        for block in blocks:
            x_1NH, _ = applied(block, x_1NH, context)
        cast(Block, last).read(x_1NH, context)
        _advance(groups)

    def _embedded_groups(self, groups: Sequence[tuple[Tensor, DecodingState | None]]) -> tuple[Tensor, ForwardContext]:
        """Return the input of the first block, (1, N, H), and what travels with it."""
        contexts = tuple(ForwardContext(state=state) for _, state in groups)
        embedded = [self._embedded(tokens_Bn, own) for (tokens_Bn, _), own in zip(groups, contexts, strict=True)]
        together = ForwardContext(groups=contexts)
        together.tokens_Bn = torch.cat([tokens_Bn.flatten() for tokens_Bn, _ in groups]).unsqueeze(0)
        together.valid_Bn = self._valid(together.tokens_Bn)
        return torch.cat([x_BnH.flatten(0, 1) for x_BnH in embedded]).unsqueeze(0), together

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


def _advance(groups: Sequence[tuple[Tensor, DecodingState | None]]) -> None:
    for tokens_Bn, state in groups:
        if state is not None:
            state.length += tokens_Bn.size(1)
