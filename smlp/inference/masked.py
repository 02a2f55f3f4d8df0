"""A trained masked language model with its dictionary and tokenizer: what scripts and notebooks work with.

Letters: ``B`` texts, ``n`` tokens of the longest, ``M`` masked positions, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smlp.errors import UserError
from smlp.nn.encoder import Encoder
from smlp.text.tokenizer import Tokenizer, Vocabulary, check_characters
from smlp.text.tokenizer_files import MASK


@dataclass(frozen=True)
class Filling:
    """One token that a masked language model puts in place of a mask."""

    token: int
    #: the token as text
    text: str
    probability: float


class MaskedLanguageModel(nn.Module):
    """A trained encoder with its dictionary and tokenizer."""

    def __init__(self, encoder: Encoder, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.encoder = encoder
        self.tokenizer = tokenizer

    @property
    def core(self) -> Encoder:
        """The model without its tokenizer."""
        return self.encoder

    @property
    def vocabulary(self) -> Vocabulary:
        """Symbols and ids, those of ``<mask>`` too."""
        return self.tokenizer.vocabulary

    def forward(self, tokens_Bn: Tensor, masked: Tensor | None = None) -> Tensor:
        """Return logits (M, V) of masked positions, by default (B, n, V); see :class:`smlp.nn.encoder.Encoder`."""
        return self.encoder(tokens_Bn, masked)

    def tokenize(self, text: str, *more: str) -> list[int]:
        """Return the ids of a text, or of several that are read together: ``<s> text </s> more </s>``.

        ``masked_lm`` joins lines in this way, ``smlp data glue`` and ``squad`` pairs; RoBERTa has ``</s></s>`` between
        texts. ``<mask>`` in a text becomes the symbol.
        """
        ids = [Vocabulary.bos]
        for part in (text, *more):
            check_characters(part)
            first, *others = (self.tokenizer.encode(piece) for piece in part.split(MASK))
            ids += first
            for piece in others:
                ids += [self.vocabulary.index[MASK], *piece]
            ids.append(Vocabulary.eos)
        return ids

    def detokenize(self, tokens: Iterable[int]) -> str:
        """Return the text of ids."""
        return self.tokenizer.decode(tokens)

    def batch(self, texts: Sequence[str]) -> Tensor:
        """Return the ids of texts, padded on the right, (B, n), on the model's device.

        Raises:
            UserError: there is no text, or one is longer than the model's context.
        """
        texts = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else texts
        if not isinstance(texts, list) or not texts:
            raise UserError(f"texts must be a list of texts, got {texts!r:.80}")
        rows = [torch.tensor(self.tokenize(text)) for text in texts]
        longest, most = max(map(len, rows)), self.encoder.config.max_tokens
        if longest > most:
            raise UserError(f"a text of {longest} tokens is longer than the model's context of {most}")
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.encoder.config.padding_idx)
        return padded.to(self.encoder.embedding.weight.device)

    @torch.no_grad()  # no inference tensors: a head that is being trained may take them
    def features(self, texts: Sequence[str]) -> Tensor:
        """Return the hidden states of texts, (B, n, H); row 0 of each is that of ``<s>``.

        Raises:
            UserError: a text is longer than the model's context.
        """
        return self.encoder.features(self.batch(texts))

    @torch.inference_mode()
    def fill(self, text: str, num_choices: int = 5) -> list[list[Filling]]:
        """Return the most probable tokens for each ``<mask>`` of a text, the best one first::

            model.fill("The <mask> rises in the east.")[0][0].text

        Raises:
            UserError: the text has no ``<mask>`` or is longer than the model's context, or ``num_choices`` is below 1.
        """
        if type(num_choices) is not int or num_choices < 1:
            raise UserError(f"num_choices must be a whole number of at least 1, got {num_choices!r:.80}")
        tokens_1n = self.batch([text])
        masked_1n = tokens_1n == self.vocabulary.index[MASK]
        if not masked_1n.any():
            raise UserError(f"there is no {MASK} in the text {text[:60]!r}")
        probabilities_MV = self(tokens_1n, masked_1n).float().softmax(-1)
        best = probabilities_MV.topk(min(num_choices, probabilities_MV.size(1)))
        return [
            [
                Filling(token, self.tokenizer.decode([token]), probability)
                for token, probability in zip(*of_mask, strict=True)
            ]
            for of_mask in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
