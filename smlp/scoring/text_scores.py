"""Log-probabilities of texts, for people who compare a handful of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from smlp.errors import UserError
from smlp.nn.decoder import Decoder
from smlp.scoring.candidates import CandidateScorer
from smlp.scoring.texts import encode_pair, fit
from smlp.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextScore:
    """What a model makes of one text."""

    #: what comes before the text that is scored
    context: str
    text: str
    #: ids of the text
    tokens: list[int]
    #: natural log-probability of each of them
    log_probs: list[float]
    #: whether greedy decoding would write the text after its context
    is_greedy: bool

    @property
    def log_prob(self) -> float:
        """Of the whole text, in nats."""
        return sum(self.log_probs)

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(-self.log_prob / len(self.log_probs))


def score_texts(
    decoder: Decoder,
    tokenizer: Tokenizer,
    start_token: int,
    pairs: Sequence[tuple[str, str]],
    batch_tokens: int = 8192,
    newline: str = "eos",
    fill_prefix: bool = False,
) -> list[TextScore]:
    """Scores of texts after their contexts, in order.

    Args:
        decoder: in evaluation mode; should drop no token.
        tokenizer: of the model.
        start_token: id before every context.
        pairs: contexts, which may be empty, and what follows them; spaces between them belong to either.
        batch_tokens: positions in a batch.
        newline: what a line break becomes, ``"eos"`` as in training or ``"space"``.
        fill_prefix: put start symbols before contexts shorter than the prefix of a model with partial routing.

    Raises:
        UserError: a text is empty, or longer than the model's context, or begins within the prefix.
    """
    members: dict[str, list[int]] = {}
    for number, (context, _) in enumerate(pairs):
        members.setdefault(context, []).append(number)
    prefix_tokens = decoder.config.prefix_tokens
    groups = []
    for numbers in members.values():
        texts = [encode_pair(tokenizer, *pairs[number], newline) for number in numbers]
        group = fit(texts, decoder.config.max_tokens, start_token, prefix_tokens if fill_prefix else 0)
        if any(text.num_context + group.num_filled < prefix_tokens for text in group.texts):
            raise UserError(
                f"{pairs[numbers[0]][1]!r} begins within the first {prefix_tokens} positions, which only choose "
                "experts: give a longer context or fill the prefix"
            )
        groups.append(group)
    scorer = CandidateScorer(decoder)
    found: dict[int, TextScore] = {}
    numbers_of = list(members.values())
    for batch in scorer.plan(groups, batch_tokens):
        for place, scored in zip(batch.members, scorer.score(groups, batch), strict=True):
            for number, text, scores in zip(numbers_of[place], groups[place].texts, scored, strict=True):
                size = text.num_continuation
                found[number] = TextScore(
                    *pairs[number],
                    tokens=list(text.tokens[-size:]),
                    log_probs=scores.log_probs[-size:].tolist(),
                    is_greedy=bool(scores.is_greedy[-size:].all()),
                )
    return [found[number] for number in range(len(pairs))]
