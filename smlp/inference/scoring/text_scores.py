"""Log-probabilities of texts, for people who compare a handful of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smlp.errors import UserError
from smlp.evaluation.perplexity import of_nats
from smlp.inference.scoring.candidates import CandidateScorer
from smlp.inference.scoring.encoding import Encoding
from smlp.inference.scoring.texts import Candidates
from smlp.nn.decoder import Decoder


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
    #: tokens that the context lost on its left to make room
    num_cut: int

    @property
    def log_prob(self) -> float:
        """Of the whole text, in nats."""
        return sum(self.log_probs)

    @property
    def perplexity(self) -> float:
        """Per token."""
        return of_nats(-self.log_prob / len(self.log_probs))


def score_texts(
    decoder: Decoder, encoding: Encoding, pairs: Sequence[tuple[str, str]], batch_tokens: int = 8192
) -> list[TextScore]:
    """Scores of texts after their contexts, in order.

    Args:
        decoder: in evaluation mode; should drop no token.
        encoding: of its texts.
        pairs: contexts, which may be empty, and what follows them; spaces between them belong to either.
        batch_tokens: positions in a batch.

    Raises:
        UserError: a text is empty, or longer than the model's context, or begins within the prefix.
    """
    prefix_tokens = decoder.config.prefix_tokens
    alike: dict[tuple, list[int]] = {}
    alone = []
    for number, pair in enumerate(pairs):
        one = encoding.group([encoding.pair(*pair)])
        if one.begins_within(prefix_tokens):
            raise UserError(
                f"{pair[1]!r} begins within the first {prefix_tokens} positions, which only choose experts: give a "
                "longer context or fill the prefix"
            )
        alone.append(one)
        # contexts that lost as much are still alike
        alike.setdefault((pair[0], one.lead, one.num_cut), []).append(number)
    groups = [
        Candidates(tuple(alone[number].texts[0] for number in numbers), num_cut, lead)
        for (_, lead, num_cut), numbers in alike.items()
    ]
    found: dict[int, TextScore] = {}
    numbers_of = list(alike.values())
    for place, scored in CandidateScorer(decoder).each(groups, batch_tokens):
        for number, text, scores in zip(numbers_of[place], groups[place].texts, scored, strict=True):
            size = text.num_continuation
            found[number] = TextScore(
                *pairs[number],
                tokens=list(text.tokens[-size:]),
                log_probs=scores.log_probs[-size:].tolist(),
                is_greedy=bool(scores.is_greedy[-size:].all()),
                num_cut=groups[place].num_cut,
            )
    return [found[number] for number in range(len(pairs))]
