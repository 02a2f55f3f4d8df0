"""Checkpoints of ``fairseq-train`` as plain PyTorch models; needs no fairseq."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn

from smlp.checkpoint.export import PREFIX
from smlp.checkpoint.opened import open_checkpoint
from smlp.checkpoint.text_files import tokenizer_of
from smlp.checkpoint.verify import fit_problems
from smlp.config import LEAKY_WARNING
from smlp.context import DecodingState
from smlp.errors import UserError
from smlp.generation import Sampling, generate
from smlp.nn.decoder import Decoder, DecoderOutput
from smlp.tokenizer import Tokenizer, Vocabulary


class LanguageModel(nn.Module):
    """A trained decoder with its dictionary and tokenizer."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, start_token: int = Vocabulary.eos) -> None:
        super().__init__()
        self.decoder = decoder
        self.tokenizer = tokenizer
        #: what every training sample began with: ``</s>``, or ``<s>`` after training with --add-bos-token
        self.start_token = start_token

    @property
    def vocabulary(self) -> Vocabulary:
        """Symbols and ids."""
        return self.tokenizer.vocabulary

    def forward(self, tokens_Bn: Tensor, state: DecodingState | None = None) -> DecoderOutput:
        """Next-token logits (B, n, V); see :meth:`smlp.nn.decoder.Decoder.forward`."""
        return self.decoder(tokens_Bn, state)

    def stream(
        self, prompt: str, max_new_tokens: int, sampling: Sampling | None = None, fill_prefix: bool = False
    ) -> Iterator[str]:
        """The continuation of a prompt, piece by piece; see :func:`smlp.generation.generate`.

        A prompt that is too long is refused at once, before the first piece is asked for. ``fill_prefix`` puts start
        symbols before a prompt that is too short for a model with partial routing.
        """
        tokens = [self.start_token, *self.tokenizer.encode(prompt)]
        # never written: padding, <s>, unknown, and fairseq's filler symbols
        banned = [self.vocabulary.bos, self.vocabulary.pad, self.vocabulary.unk]
        banned += [token for symbol, token in self.vocabulary.index.items() if symbol.startswith("madeupword")]
        fill = self.start_token if fill_prefix else None
        return map(self.tokenizer.piece, generate(self.decoder, tokens, max_new_tokens, sampling, banned, fill))

    def generate(
        self, prompt: str, max_new_tokens: int = 50, sampling: Sampling | None = None, fill_prefix: bool = False
    ) -> str:
        """The continuation of a prompt as text."""
        return "".join(self.stream(prompt, max_new_tokens, sampling, fill_prefix))


def load_pretrained(
    path: str | Path,
    dictionary: str | Path | None = None,
    sentencepiece_model: str | Path | None = None,
) -> LanguageModel:
    """A model from a checkpoint of ``fairseq-train --user-dir smlp``, in evaluation mode on the CPU.

    The checkpoint may be in one file, in parts written by several ranks, or an export. An export brings its dictionary
    and tokenizer along. For others, ``dict.txt`` and ``sentencepiece.model`` are looked for beside the checkpoint and
    then in the data directory that it was trained on, the latter also beside a dictionary that is named; the arguments
    name other places.

    Raises:
        UserError: a file is missing or damaged, or the dictionary does not fit the checkpoint.
    """
    checkpoint = open_checkpoint(path)
    tokenizer = tokenizer_of(checkpoint, dictionary, sentencepiece_model)
    for problem in fit_problems(checkpoint):
        raise UserError(problem)
    if checkpoint.config.is_leaky:
        warnings.warn(LEAKY_WARNING, stacklevel=2)
    decoder = Decoder(checkpoint.config)
    for name, tensor in decoder.state_dict().items():
        tensor.copy_(checkpoint.state["model"][PREFIX + name].load())
    options = checkpoint.state["cfg"]["model"]
    start_token = Vocabulary.bos if options.get("add_bos_token") else Vocabulary.eos
    return LanguageModel(decoder, tokenizer, start_token).eval()
