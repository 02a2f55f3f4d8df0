"""How texts become what one model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smlp.config import ModelConfig
from smlp.inference.scoring.texts import Candidates, TokenizedText, encode_pair, fit
from smlp.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Encoding:
    """A model's tokenizer, start symbol and room, and what the user decides about line breaks and the prefix."""

    tokenizer: Tokenizer
    config: ModelConfig
    #: id before every text
    start_token: int
    #: a line break becomes ``</s>`` ("eos") or a space ("space")
    newline: str = "eos"
    #: whether start symbols fill the prefix of a model with partial routing
    fill_prefix: bool = False

    def pair(self, context: str, continuation: str) -> TokenizedText:
        """Both texts as ids; see :func:`smlp.inference.scoring.texts.encode_pair`."""
        return encode_pair(self.tokenizer, context, continuation, self.newline)

    def group(self, texts: Sequence[TokenizedText]) -> Candidates:
        """Candidates that fit the model; see :func:`smlp.inference.scoring.texts.fit`."""
        prefix_tokens = self.config.prefix_tokens if self.fill_prefix else 0
        return fit(texts, self.config.max_tokens, self.start_token, prefix_tokens)
