"""Turn a context and its continuation into ids that a model can score.

The models have seen lines that each end in ``</s>``, so a line break is scored as ``</s>`` too or, on request, as a
space. The symbol before every text (``</s>``, or ``<s>`` after training with ``--add-bos-token``) is never part of
these ids: the scorer puts it there once.

Letters: ``T`` the model's context, ``P`` its prefix that only chooses experts, ``L`` tokens of a text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from smlp.config import ModelConfig
from smlp.config.settings import require
from smlp.errors import UserError
from smlp.text.tokenizer import Tokenizer, Vocabulary


class TooLongError(UserError):
    """A continuation alone does not fit the model's context."""


class NoTokenError(UserError):
    """A continuation adds no token to its context."""


@dataclass(frozen=True)
class TokenizedText:
    """A context with its continuation."""

    #: ids of both together, (L,)
    tokens: tuple[int, ...]
    #: number of context tokens
    num_context: int

    @property
    def num_continuation(self) -> int:
        """Tokens of the continuation, at least one."""
        return len(self.tokens) - self.num_context


@dataclass(frozen=True)
class Candidates:
    """Texts that are scored together because they are compared; their common beginning is computed once."""

    texts: tuple[TokenizedText, ...]
    #: tokens that were cut from the left of every context
    num_cut: int = 0
    #: ids before every text: the start symbol, several times where a prefix is filled
    lead: tuple[int, ...] = (Vocabulary.eos,)

    @property
    def num_filled(self) -> int:
        """Symbols before the one that every text has."""
        return len(self.lead) - 1

    @cached_property
    def first(self) -> int:
        """The first token that has to be scored to compare the candidates: all begin alike before it."""
        shared = common_prefix([text.tokens for text in self.texts])
        return min(shared, *(text.num_context for text in self.texts))

    def ends_within(self, prefix_tokens: int) -> bool:
        """Return whether a whole text lies among the first positions, which only choose experts, so that none of it is
        scored."""
        return any(len(text.tokens) + self.num_filled <= prefix_tokens for text in self.texts)

    def begins_within(self, prefix_tokens: int) -> bool:
        """Return whether a continuation begins among the first positions, so that not all of it is scored."""
        return any(text.num_context + self.num_filled < prefix_tokens for text in self.texts)


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Return how many leading tokens all sequences share."""
    shortest = min(map(len, sequences))
    first = sequences[0]
    same = (all(sequence[place] == first[place] for sequence in sequences) for place in range(shortest))
    return next((place for place, alike in enumerate(same) if not alike), shortest)


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str, newline: str = "eos") -> TokenizedText:
    """Return the ids of both texts joined; the context ends where they stop agreeing with its own ids.

    Raises:
        NoTokenError: the continuation has no token of its own.
    """
    tokens = tokenizer.encode_lines(context + continuation, newline)
    num_context = common_prefix([tokenizer.encode_lines(context, newline), tokens])
    if num_context == len(tokens):
        raise NoTokenError(f"the continuation {continuation!r} adds no token to {_end(context)!r}")
    return TokenizedText(tuple(tokens), num_context)


def _end(text: str, length: int = 40) -> str:
    return text if len(text) <= length else "..." + text[-length:]


def fit(
    texts: Sequence[TokenizedText], max_tokens: int, start_token: int = Vocabulary.eos, prefix_tokens: int = 0
) -> Candidates:
    """Make candidates short enough for a model, and long enough if its prefix is to be filled.

    Positions are absolute, so nothing is padded on the left; contexts are cut there. All candidates lose the same
    number of tokens, so that they still begin alike; continuations lose none. (Where contexts differ and a short one is
    filled up, a long one may have to lose more.)

    Args:
        texts: candidates.
        max_tokens: T.
        start_token: id that stands before every text.
        prefix_tokens: P, to put start symbols before short contexts until every continuation comes after the prefix; 0
            to leave them as they are.

    Raises:
        TooLongError: a continuation alone is too long; the message has the numbers.
    """
    room = max_tokens - prefix_tokens
    longest = max(text.num_continuation for text in texts)
    if longest > room:
        beside = f" after its prefix of {prefix_tokens}" if prefix_tokens else ""
        raise TooLongError(
            f"a candidate has {longest} tokens, but the model's context holds {room}{beside} (max_tokens={max_tokens})"
        )
    num_cut = max(0, *(len(text.tokens) - max_tokens for text in texts))
    num_filled = max(0, prefix_tokens - min(text.num_context - min(num_cut, text.num_context) for text in texts))
    # a long context batched with a short padded one has to be cut further
    cuts = [max(num_cut, num_filled + len(text.tokens) - max_tokens) for text in texts]
    cut = tuple(_cut(text, min(count, text.num_context)) for text, count in zip(texts, cuts, strict=True))
    return Candidates(cut, max(cuts), (start_token,) * (num_filled + 1))


def _cut(text: TokenizedText, count: int) -> TokenizedText:
    return dataclasses.replace(text, tokens=text.tokens[count:], num_context=text.num_context - count)


@dataclass(frozen=True)
class Encoding:
    """A model's tokenizer, start symbol and settings, and the user's choices for line breaks and the prefix."""

    tokenizer: Tokenizer
    config: ModelConfig
    #: id before every text
    start_token: int
    #: a line break becomes ``</s>`` ("eos") or a space ("space")
    newline: str = "eos"
    #: whether start symbols fill the prefix of a model with partial routing
    fill_prefix: bool = False

    def __post_init__(self) -> None:
        require(self.fill_prefix in (True, False), f"fill_prefix must be True or False, got {self.fill_prefix!r}")

    def pair(self, context: str, continuation: str) -> TokenizedText:
        """Return both texts as ids; see :func:`smlp.inference.scoring.texts.encode_pair`."""
        return encode_pair(self.tokenizer, context, continuation, self.newline)

    def group(self, texts: Sequence[TokenizedText]) -> Candidates:
        """Return the candidates that fit the model; see :func:`smlp.inference.scoring.texts.fit`."""
        prefix_tokens = self.config.prefix_tokens if self.fill_prefix else 0
        return fit(texts, self.config.max_tokens, self.start_token, prefix_tokens)
