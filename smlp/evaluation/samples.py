"""Cuts a stream of tokens into the samples that a model is scored on, as ``fairseq-eval-lm`` cuts it.

Letters: ``N`` tokens of the stream, ``L`` lines (each with its ``</s>``), ``S`` samples, ``M`` positions in all
samples, ``T`` the model's context, ``B`` samples of a batch, ``n`` positions of the longest of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from smlp.config import ModelConfig
from smlp.errors import UserError
from smlp.text.tokenizer import Vocabulary


@dataclass(frozen=True)
class Cutting:
    """Settings for cutting a stream into samples.

    Raises:
        UserError: the numbers do not fit each other; the message names fairseq's options.
    """

    #: T, the model's context
    max_tokens: int
    #: fairseq's ``--tokens-per-sample``: tokens of a sample, its context included
    tokens_per_sample: int
    #: one of :data:`smlp.evaluation.BREAK_MODES`
    break_mode: str = "none"
    #: fairseq's ``--context-window``: the number of preceding tokens fed with a sample, as far as available
    context_window: int = 0
    #: leading positions of each input that a model does not predict
    prefix: int = 0
    #: start symbol of a sample: ``</s>``, or ``<s>``, which is then prepended
    start_token: int = Vocabulary.eos

    def __post_init__(self) -> None:
        size, window, room = self.tokens_per_sample, self.context_window, self.max_tokens - self.has_start
        if not 1 <= size <= room:
            raise UserError(
                f"--tokens-per-sample {size} must be at least 1 and no longer than the context of {room} tokens that "
                "the model was trained with"
            )
        if not 0 <= window < size:
            raise UserError(
                f"--context-window {window} must be at least 0 and leave some of --tokens-per-sample {size} to score"
            )

    @classmethod
    def in_blocks(cls, config: ModelConfig, start_token: int = Vocabulary.eos) -> Cutting:
        """Return the settings for blocks as long as the context, as a model is trained."""
        size = config.max_tokens - int(start_token != Vocabulary.eos)
        return cls(config.max_tokens, size, prefix=config.prefix_tokens, start_token=start_token)

    @property
    def has_start(self) -> int:
        """Return 1 if each sample begins with a symbol that is not scored, else 0."""
        return int(self.start_token != Vocabulary.eos)


@dataclass(frozen=True)
class SampleBatch:
    """Inputs of one forward pass, padded on the right."""

    #: ids, (B, n)
    sources_Bn: Tensor
    #: what follows each
    targets_Bn: Tensor
    #: which token of the stream each target is; -1 where it is not to be scored
    places_Bn: Tensor


@dataclass(frozen=True)
class Samples:
    """Samples of a stream, one after the other; each input begins with ``context_S`` positions before the sample."""

    #: ids fed, (M,)
    sources_M: np.ndarray
    #: the token after each, (M,)
    targets_M: np.ndarray
    #: which token of the stream each target is, (M,); -1 at symbols that stand before samples
    places_M: np.ndarray
    #: where each sample's own positions begin and end, (S,)
    first_S: np.ndarray
    end_S: np.ndarray
    #: positions before ``first_S`` that are fed too, (S,)
    context_S: np.ndarray
    #: the first position of each input that is scored, (S,)
    scored_from_S: np.ndarray

    def __len__(self) -> int:
        return len(self.first_S)

    @property
    def lengths_S(self) -> np.ndarray:
        """Return the number of positions of each input, context included."""
        return self.end_S - self.first_S + self.context_S

    @property
    def num_scored(self) -> int:
        """Return the number of tokens that are scored."""
        return int(np.maximum(self.lengths_S - self.scored_from_S, 0).sum())

    def batches(self, batch_size: int | None = None, max_tokens: int | None = None) -> list[np.ndarray]:
        """Return the numbers of samples that are fed together, longest inputs first; those without a scored position
        are left out.

        Args:
            batch_size: samples of a batch at most; None for any number.
            max_tokens: positions of a batch at most, padding included, if a batch has more than one sample.
        """
        lengths_S = self.lengths_S
        wanted = np.flatnonzero(self.scored_from_S < lengths_S)
        order = wanted[np.argsort(-lengths_S[wanted], kind="stable")]
        batches, start = [], 0
        while start < len(order):
            count = len(order) if batch_size is None else batch_size
            if max_tokens is not None:
                count = min(count, max(1, max_tokens // int(lengths_S[order[start]])))
            batches.append(order[start : start + count])
            start += count
        return batches

    def batch(self, numbers: np.ndarray) -> SampleBatch:
        """Return the inputs of these samples; for no samples, a batch without rows."""
        lengths = self.lengths_S[numbers]
        shape = (len(numbers), int(lengths.max(initial=1)))
        sources, targets = np.full(shape, Vocabulary.pad), np.full(shape, Vocabulary.pad)
        places = np.full(shape, -1)
        for row, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
            part = slice(self.end_S[number] - length, self.end_S[number])
            sources[row, :length], targets[row, :length] = self.sources_M[part], self.targets_M[part]
            scored = self.scored_from_S[number]
            places[row, scored:length] = self.places_M[part][scored:]
        return SampleBatch(*map(torch.from_numpy, (sources, targets, places)))

    def up_to(self, num_tokens: int) -> Samples:
        """Return the first samples, until they hold this many tokens of the text."""
        held_S = np.cumsum(self.places_M >= 0)[self.end_S - 1]  # start symbols are none
        inside = int(np.searchsorted(held_S, num_tokens)) + 1
        per_sample = (self.first_S, self.end_S, self.context_S, self.scored_from_S)
        return Samples(self.sources_M, self.targets_M, self.places_M, *(values[:inside] for values in per_sample))


def cut(tokens_N: np.ndarray, lengths_L: np.ndarray, cutting: Cutting) -> Samples:
    """Cut a stream as fairseq's TokenBlockDataset, MonolingualDataset and LMContextWindowDataset do.

    Every token is predicted from the one before it; if a sample starts with a line, its first token from ``</s>``.
    Samples longer than the model's context are left out, as fairseq leaves them out. Context is what was fed before, as
    much of it as fits into ``tokens_per_sample`` together with the sample.

    Args:
        tokens_N: ids (N,), int64.
        lengths_L: of the lines (L,), which sum to N.
        cutting: how.
    """
    # fairseq shortens samples to make room for the context
    size = cutting.tokens_per_sample - cutting.context_window
    bounds_S2 = block_bounds(lengths_L, cutting.break_mode, size)
    size_S = bounds_S2[:, 1] - bounds_S2[:, 0]
    kept_S = (size_S > 0) & (size_S + cutting.has_start <= cutting.max_tokens)
    start_S, own_S = bounds_S2[kept_S, 0], size_S[kept_S] + cutting.has_start
    end_S = own_S.cumsum()
    first_S = end_S - own_S
    places_M = np.arange(own_S.sum()) + np.repeat(start_S - first_S - cutting.has_start, own_S)
    sources_M, targets_M = tokens_N[places_M - 1], tokens_N[places_M]
    line_start_N = np.zeros(len(tokens_N) + 1, dtype=bool)
    line_start_N[np.concatenate([[0], np.cumsum(lengths_L)])] = True
    at_line_start = first_S[line_start_N[start_S]] + cutting.has_start
    sources_M[at_line_start] = Vocabulary.eos
    if cutting.has_start:
        sources_M[first_S] = targets_M[first_S] = cutting.start_token
        places_M[first_S] = -1
    room_S = np.maximum(cutting.tokens_per_sample - own_S, 0)
    context_S = np.minimum(np.minimum(first_S, cutting.context_window), room_S)
    scored_from_S = np.maximum(context_S + cutting.has_start, cutting.prefix)
    return Samples(sources_M, targets_M, places_M, first_S, end_S, context_S, scored_from_S)


def block_bounds(lengths_L: np.ndarray, break_mode: str, size: int) -> np.ndarray:
    """Return the first and the end position of each sample of at most ``size`` tokens in the stream, (S, 2) int64.

    ``none`` cuts anywhere; ``eos`` makes a sample of each line, ``complete`` of as many whole lines as fit, or of one
    that does not fit; ``complete_doc`` does the same but begins anew after a line of one token, which is in no sample.
    """
    ends_L = np.cumsum(lengths_L, dtype=np.int64)
    total = int(ends_L[-1]) if len(ends_L) else 0
    if break_mode == "none":
        starts = np.arange(0, total, size, dtype=np.int64)
        return np.stack([starts, np.minimum(starts + size, total)], axis=1)
    if break_mode == "eos":
        return np.stack([ends_L - lengths_L, ends_L], axis=1)
    by_document = break_mode == "complete_doc"
    bounds, start, end = [], 0, 0
    for length in lengths_L.tolist():
        is_separator = by_document and length == 1
        if is_separator or (end > start and end - start + length > size):
            bounds.append((start, end))
            start = end
        end += length
        if is_separator:
            start = end
    bounds.append((start, end))
    return np.array([pair for pair in bounds if pair[1] > pair[0]], dtype=np.int64).reshape(-1, 2)
