"""The encoder: a stack whose positions see each other, trained to restore masked tokens, with heads for other tasks.

Letters: ``B`` sequences, ``n`` tokens (n <= T), ``M`` masked positions of a batch, ``H`` width, ``V`` vocabulary, ``C``
classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from smlp.config import ModelConfig
from smlp.errors import UserError
from smlp.nn.layers import Dropout, xavier_linear
from smlp.nn.stack import Stack
from smlp.nn.state import ForwardContext
from smlp.ops import ACTIVATION_FUNCTIONS
from smlp.parallel import Ranks


class MaskedHead(nn.Module):
    """``LN(act(W x + b))`` before the tied output, and the output's bias (Devlin et al., 2019; BERT's own code)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.proj = xavier_linear(config.embed_dim, config.embed_dim)
        self.activation = ACTIVATION_FUNCTIONS[config.activation]
        self.norm = nn.LayerNorm(config.embed_dim)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, x_MH: Tensor) -> Tensor:
        """Map (..., H) to (..., H)."""
        return self.norm(self.activation(self.proj(x_MH)))


class SentenceHead(nn.Module):
    """Scores of classes, or values, from the first position: ``W2 tanh(W1 x + b1) + b2``, as BERT's pooler."""

    def __init__(self, embed_dim: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.pooler = xavier_linear(embed_dim, embed_dim)
        self.proj = xavier_linear(embed_dim, num_classes)

    def forward(self, x_BnH: Tensor) -> Tensor:
        """Map (B, n, H) to (B, C)."""
        pooled_BH = self.pooler(self.dropout(x_BnH[:, 0])).tanh()
        return self.proj(self.dropout(pooled_BH))


class Encoder(Stack):
    """A masked language model, with heads for fine-tuning.

    Args:
        config: of the whole model, with ``direction="bidirectional"``.
        ranks: must be a single process, since every rank holds a whole copy.

    Raises:
        UserError: the configuration is that of a language model.
    """

    def __init__(self, config: ModelConfig, ranks: Ranks | None = None) -> None:
        if not config.is_bidirectional:
            raise UserError(f"direction={config.direction} makes a language model; an encoder must be bidirectional")
        super().__init__(config, ranks)
        self.head = MaskedHead(config)
        #: heads for sentences and pairs of sentences, by name
        self.sentence_heads = nn.ModuleDict()
        #: scores of the first and the last token of an answer, if asked for
        self.span_head: nn.Linear | None = None

    def forward(self, tokens_Bn: Tensor, masked: Tensor | None = None) -> Tensor:
        """Return the logits of the original tokens at masked positions.

        Args:
            tokens_Bn: ids (B, n). Padding may stand on the right only; it changes no other output.
            masked: positions to predict, (B, n) bool, or their indices in ``tokens_Bn.flatten()``, (M,); all
                by default.

        Returns:
            (M, V), or (B, n, V) without ``masked``.

        Raises:
            UserError: the sequences are longer than ``max_tokens``.
        """
        return self.predict(self.features(tokens_Bn), masked)

    def features(self, tokens_Bn: Tensor) -> Tensor:
        """Return the hidden states (B, n, H) of ids (B, n)."""
        return self._features(tokens_Bn, ForwardContext())[0]

    def predict(self, x_BnH: Tensor, masked: Tensor | None = None) -> Tensor:
        """Return the logits (M, V) of hidden states (B, n, H); ``masked`` as in :meth:`forward`."""
        if masked is not None:
            x_BnH = x_BnH[masked] if masked.dtype == torch.bool else x_BnH.flatten(0, 1)[masked]
        return self.project(self.head(x_BnH)) + self.head.bias

    def add_sentence_head(self, name: str, num_classes: int) -> None:
        """Add a head with random weights, or replace one of that name; the masked LM head is not trained any more.

        Raises:
            UserError: no module can have this name.
        """
        heads = self.sentence_heads
        if not name or "." in name or (hasattr(heads, name) and name not in heads):
            raise UserError(f"--classification-head-name {name!r} cannot be the name of a part of a model")
        head = SentenceHead(self.config.embed_dim, num_classes, self.config.dropout)
        self.sentence_heads[name] = head.to(self.embedding.weight)
        self.head.requires_grad_(False)  # ranks would wait for its gradient

    def add_span_head(self) -> None:
        """Add the head for spans, with random weights, if there is none; the masked LM head is not trained any more."""
        self.head.requires_grad_(False)
        if self.span_head is None:
            self.span_head = xavier_linear(self.config.embed_dim, 2).to(self.embedding.weight)


def add_heads(model: Encoder, state: Mapping[str, Tensor]) -> None:
    """Add the heads whose tensors a checkpoint holds, under names that end as in the model's own state."""
    for name, tensor in state.items():
        if (match := _OF_SENTENCES.search(name)) and tensor.shape:
            model.add_sentence_head(match[1], tensor.shape[0])
        elif name.endswith("span_head.weight"):
            model.add_span_head()


_OF_SENTENCES = re.compile(r"sentence_heads\.(.+)\.proj\.weight$")

#: endings of the names of tensors that have a position axis
_OVER_POSITIONS = (
    *("positions", ".heads.weight", ".heads.bias"),
    *(".tokens_in.weight", ".tokens_out.weight", ".tokens_out.bias"),
)


def cut_context(state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], num_tokens: int) -> dict[str, Tensor]:
    """Cut the tensors of a model with a longer context to a context of T tokens, which makes fine-tuning cheaper.

    Weights over positions keep their leading rows and columns, Toeplitz weights the central 2T-1 distances. For inputs
    of up to T tokens the outputs do not change.

    Args:
        state: tensors by name.
        shapes: of the tensors of the shorter model, by name; a tensor of another number of axes is left as it is.
        num_tokens: T.
    """
    cut = dict(state)
    for name, tensor in state.items():
        wanted = shapes.get(name)
        if wanted is None or len(wanted) != tensor.dim() or not name.endswith(_OVER_POSITIONS):
            continue
        for axis, size in enumerate(wanted):
            is_toeplitz = name.endswith(".heads.weight") and tensor.dim() == 2 and size == 2 * num_tokens - 1
            if tensor.size(axis) > size and (is_toeplitz or size == num_tokens):
                tensor = tensor.narrow(axis, (tensor.size(axis) - size) // 2 if is_toeplitz else 0, size)
        cut[name] = tensor
    return cut
