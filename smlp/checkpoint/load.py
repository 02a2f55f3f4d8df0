"""Checkpoints of ``fairseq-train`` as plain PyTorch models; needs no fairseq."""

from __future__ import annotations

import warnings
from pathlib import Path

from smlp.checkpoint.checksums import check_sums
from smlp.checkpoint.export import PREFIX
from smlp.checkpoint.opened import open_checkpoint
from smlp.checkpoint.text_files import tokenizer_of
from smlp.checkpoint.verify import fit_problems
from smlp.config import LEAKY_WARNING
from smlp.errors import UserError
from smlp.inference.language_model import LanguageModel
from smlp.nn.decoder import Decoder
from smlp.text.tokenizer import Vocabulary


def load_pretrained(
    path: str | Path,
    dictionary: str | Path | None = None,
    tokenizer: str | Path | None = None,
) -> LanguageModel:
    """A model from a checkpoint of ``fairseq-train --user-dir smlp``, in evaluation mode on the CPU.

    The checkpoint may be in one file, in parts written by several ranks, or an export. An export brings its dictionary
    and tokenizer along. For others, ``dict.txt`` and ``sentencepiece.model`` (or ``encoder.json`` with ``vocab.bpe``)
    are looked for beside the checkpoint and then in the data directory that it was trained on, the tokenizer also
    beside a dictionary that is named; the arguments name other places.

    Raises:
        UserError: a file is missing or damaged, or the dictionary does not fit the checkpoint.
    """
    checkpoint = open_checkpoint(path)
    for file in checkpoint.paths:
        check_sums(file)
    text = tokenizer_of(checkpoint, dictionary, tokenizer)
    for problem in fit_problems(checkpoint):
        raise UserError(problem)
    if checkpoint.config.is_leaky:
        warnings.warn(LEAKY_WARNING, stacklevel=2)
    decoder = Decoder(checkpoint.config)
    for name, tensor in decoder.state_dict().items():
        tensor.copy_(checkpoint.state["model"][PREFIX + name].load())
    options = checkpoint.state["cfg"]["model"]
    start_token = Vocabulary.bos if options.get("add_bos_token") else Vocabulary.eos
    return LanguageModel(decoder, text, start_token).eval()
