"""From records to groups of candidates in tokens, with counts of what had to give way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from smlp.errors import UserError
from smlp.evaluation.zeroshot.templates import Example
from smlp.inference.scoring.encoding import Encoding
from smlp.inference.scoring.texts import Candidates, TooLongError
from smlp.text.tokenizer import Vocabulary

#: what stands before a candidate that is scored without its context: the field's "Answer:" (Brown et al., 2020,
#: section 2.4), or nothing, as in lm-evaluation-harness
UNCONDITIONAL_CONTEXT = {"fair": "Answer:", "gpt3": "Answer:", "lm-eval": ""}


@dataclass(frozen=True)
class Prepared:
    """Records that can be scored; ``groups[i]`` are the candidates of ``examples[i]``."""

    examples: tuple[Example, ...]
    groups: tuple[Candidates, ...]
    #: candidates without their context, only if asked for
    bare_groups: tuple[Candidates, ...]
    #: records left out because a candidate is longer than the model's context
    num_skipped: int
    #: tokens of all candidates, context included, and how many of them the dictionary does not know
    num_tokens: int
    num_unknown: int

    def parts(self) -> Iterator[Any]:
        """What the scores depend on: every record with its candidates in tokens."""
        yield from self.examples
        yield from self.groups
        yield from self.bare_groups

    @property
    def num_truncated(self) -> int:
        """Records whose prompt was cut from the left."""
        return sum(group.num_cut > 0 for group in self.groups)

    def num_partly_scored(self, prefix_tokens: int) -> int:
        """Records with continuations that begin within the model's prefix, where nothing is predicted."""
        return sum(group.begins_within(prefix_tokens) for group in self.groups)


def prepare(
    task: str,
    examples: Iterable[Example],
    encoding: Encoding,
    bare_context: str | None = None,
    skip_too_long: bool = False,
) -> Prepared:
    """Tokenises records and makes them fit.

    Args:
        task: for messages.
        examples: to be scored.
        encoding: how.
        bare_context: what to put before the candidates to score them without their contexts; None not to.
        skip_too_long: leave records out whose candidates are too long.

    Raises:
        UserError: a candidate has no token; candidates are too long and may not be left out, or lie within the
            model's prefix altogether; the message counts the records and has all of it.
    """
    kept, groups, bare_groups, too_long, unscored = [], [], [], [], []
    num_tokens = num_unknown = 0
    for record in examples:
        try:
            texts = [encoding.pair(choice.context, choice.continuation) for choice in record.choices]
            group = encoding.group(texts)
            bare = None
            if bare_context is not None:
                bare = encoding.group([encoding.pair(bare_context, f" {choice.alone}") for choice in record.choices])
        except TooLongError as error:
            too_long.append((record.id, error))
            continue
        except UserError as error:
            raise UserError(f"{task}, example {record.id}: {error}") from None
        tokens = [token for text in texts for token in text.tokens]
        num_tokens += len(tokens)
        num_unknown += tokens.count(Vocabulary.unk)
        if any(one.ends_within(encoding.config.prefix_tokens) for one in (group, bare) if one is not None):
            unscored.append(record.id)
        kept.append(record)
        groups.append(group)
        if bare is not None:
            bare_groups.append(bare)
    total = len(kept) + len(too_long)
    problems = []
    if too_long and not skip_too_long:
        where, error = too_long[0]
        problems.append(
            f"{len(too_long)} of {total} examples do not fit (first: example {where}: {error}); "
            "--skip-too-long leaves them out and counts them"
        )
    if unscored:
        problems.append(
            f"{len(unscored)} of {total} examples have a candidate that ends within the first "
            f"{encoding.config.prefix_tokens} positions, which only choose experts (first: example {unscored[0]}); "
            "--fill-prefix puts start symbols before them"
        )
    if not kept and not problems:
        problems.append(f"none of the {total} examples fits the model's context")
    if problems:
        raise UserError(f"{task}: {'; and '.join(problems)}")
    return Prepared(tuple(kept), tuple(groups), tuple(bare_groups), len(too_long), num_tokens, num_unknown)
