"""Checkpoints of ``fairseq-train`` as plain PyTorch models; needs no fairseq."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smlp.config import LEAKY_WARNING
from smlp.context import DecodingState
from smlp.errors import UserError
from smlp.generation import Sampling, generate
from smlp.nn.decoder import Decoder, DecoderOutput
from smlp.presets import from_training_options
from smlp.tokenizer import Tokenizer, Vocabulary

_PREFIX = "decoder.core."


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


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint file, on the CPU.

    Raises:
        UserError: the file is missing, truncated or no checkpoint of this package; the message names file and size.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no checkpoint {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{path} ({path.stat().st_size} bytes) is truncated or is no checkpoint: it cannot be read ({reason})"
        ) from None
    if not isinstance(state, dict) or "model" not in state or not state.get("cfg"):
        raise UserError(f"{path} is no checkpoint of fairseq-train: it has no model and configuration")
    return state


def load_pretrained(
    path: str | Path,
    dictionary: str | Path | None = None,
    sentencepiece_model: str | Path | None = None,
) -> LanguageModel:
    """A model from a checkpoint of ``fairseq-train --user-dir smlp``, in evaluation mode on the CPU.

    ``dict.txt`` and ``sentencepiece.model`` are looked for beside the checkpoint and then in the data directory that
    it was trained on, the latter also beside a dictionary that is named; the arguments name other places.

    Raises:
        UserError: a file is missing or damaged, or the dictionary does not fit the checkpoint.
    """
    state = read_checkpoint(path)
    options, task = state["cfg"]["model"], state["cfg"].get("task") or {}
    weights = {name.removeprefix(_PREFIX): value for name, value in state["model"].items() if name.startswith(_PREFIX)}
    if not weights:
        raise UserError(f"{path} holds another kind of model ({options.get('_name')}), not one of smlp's")
    folders = [Path(path).parent, *(Path(folder) for folder in str(task.get("data") or "").split(":") if folder)]
    dictionary = dictionary or _find("dict.txt", folders)
    if dictionary is None:
        raise UserError(f"no dict.txt beside {path} or in {task.get('data')}: name it with --dict")
    vocabulary = Vocabulary.load(dictionary)
    num_rows = weights["embedding.weight"].size(0)
    if num_rows != len(vocabulary):
        raise UserError(
            f"dictionary {dictionary} has {len(vocabulary)} symbols but checkpoint {path} was trained with {num_rows}"
        )
    config = from_training_options(options.get("_name"), options, num_rows, vocabulary.pad)
    if config.is_leaky:
        warnings.warn(LEAKY_WARNING, stacklevel=2)
    decoder = Decoder(config)
    try:
        decoder.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"the weights in {path} do not fit its own configuration: {error}") from None
    sentencepiece_model = sentencepiece_model or _find("sentencepiece.model", [Path(dictionary).parent, *folders])
    tokenizer = Tokenizer(vocabulary, sentencepiece_model)
    start_token = vocabulary.bos if options.get("add_bos_token") else vocabulary.eos
    return LanguageModel(decoder.float(), tokenizer, start_token).eval()


def _find(name: str, folders: list[Path]) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)
