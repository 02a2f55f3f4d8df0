"""From records to candidates in tokens, and to their log-probabilities, on one rank or shared among several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smlp.errors import UserError
from smlp.evaluation.zeroshot.partial import KeptBatches
from smlp.evaluation.zeroshot.rules import ScoredText
from smlp.evaluation.zeroshot.templates import Example
from smlp.inference.scoring.candidates import CandidateScorer
from smlp.inference.scoring.texts import Candidates, Encoding, TooLongError
from smlp.launch.team import Team
from smlp.text.tokenizer import Vocabulary

#: prefix of a candidate that is scored without its context: the usual "Answer:" (Brown et al., 2020, section 2.4), or
#: nothing, as in lm-evaluation-harness
UNCONDITIONAL_CONTEXT = {"fair": "Answer:", "gpt3": "Answer:", "lm-eval": ""}


@dataclass(frozen=True)
class Prepared:
    """Records that can be scored; ``groups[i]`` are the candidates of ``examples[i]``."""

    examples: tuple[Example, ...]
    groups: tuple[Candidates, ...]
    #: candidates without their context, if requested
    bare_groups: tuple[Candidates, ...]
    #: records skipped because a candidate exceeds the model's context
    num_skipped: int
    #: tokens of all candidates, context included, and how many of them are not in the dictionary
    num_tokens: int
    num_unknown: int

    def parts(self) -> Iterator[Any]:
        """Yield everything that the scores depend on: every record with its candidates in tokens."""
        yield from self.examples
        yield from self.groups
        yield from self.bare_groups

    @property
    def num_truncated(self) -> int:
        """Return the number of records whose prompt was cut from the left."""
        return sum(group.num_cut > 0 for group in self.groups)

    def num_partly_scored(self, prefix_tokens: int) -> int:
        """Count records with continuations that begin within the model's prefix, where nothing is predicted."""
        return sum(group.begins_within(prefix_tokens) for group in self.groups)


def prepare(
    task: str,
    examples: Iterable[Example],
    encoding: Encoding,
    bare_context: str | None = None,
    skip_too_long: bool = False,
) -> Prepared:
    """Tokenise records and make them fit the model.

    Args:
        task: for messages.
        examples: to be scored.
        encoding: how.
        bare_context: what to put before the candidates to score them without their contexts; None to skip that.
        skip_too_long: leave out records whose candidates are too long.

    Raises:
        UserError: a candidate has no token; candidates are too long and may not be left out, or lie entirely
            within the model's prefix; the message counts the records and names all problems.
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


def score_groups(
    scorer: CandidateScorer,
    groups: Sequence[Candidates],
    batch_tokens: int,
    team: Team,
    scored: Callable[[int], None] | None = None,
    kept: KeptBatches | None = None,
) -> list[list[np.ndarray]]:
    """Return the log-probabilities of all groups in their order, the same on every rank and for every number of ranks:
    the batches are those of one rank, dealt out in turn, whether or not some of them are known from a run that was
    stopped.

    Args:
        scorer: with the model.
        groups: of candidates.
        batch_tokens: positions in a batch.
        team: ranks that share the work.
        scored: called with the number of groups that have been scored since the last call, by all ranks.
        kept: batches of an earlier run; those that are scored here are added.

    Returns:
        for each group and candidate the log-probabilities of :class:`smlp.inference.scoring.candidates.TokenScores`.

    Raises:
        UserError: a batch does not fit into memory.
    """
    batches = scorer.plan(groups, batch_tokens)
    by_batch = {} if kept is None else dict(kept.known)
    missing = [number for number in range(len(batches)) if number not in by_batch]
    for first in range(0, len(missing), team.size):
        now = missing[first : first + team.size]
        own = None
        if team.rank < len(now):
            scores = scorer.score_within_memory(groups, batches[now[team.rank]], batch_tokens)
            own = [[candidate.log_probs for candidate in group] for group in scores]
        elif scorer.in_step:
            scorer.score_nothing()
        parts = dict(zip(now, team.gather(own), strict=False))
        by_batch |= parts
        if kept is not None:
            kept.add(parts)
        if scored is not None:
            scored(sum(map(len, parts.values())))
    found = {}
    for number, batch in enumerate(batches):
        found |= zip(batch.members, by_batch[number], strict=True)
    return [found[place] for place in range(len(groups))]


def score_prepared(
    scorer: CandidateScorer,
    prepared: Prepared,
    batch_tokens: int,
    team: Team,
    scored: Callable[[int], None],
    kept: tuple[KeptBatches, ...] | None,
) -> list[list[ScoredText]]:
    """Return every candidate of every record as the rules need it; ``kept`` has batches with and without contexts."""
    in_context, alone = kept or (None, None)
    results = score_groups(scorer, prepared.groups, batch_tokens, team, scored, in_context)
    bare_results = score_groups(scorer, prepared.bare_groups, batch_tokens, team, kept=alone)
    found = []
    for place, (record, group) in enumerate(zip(prepared.examples, prepared.groups, strict=True)):
        bare: list[float | None] = [None] * len(group.texts)
        if bare_results:
            bare_texts = prepared.bare_groups[place].texts
            bare = [
                ScoredText(text.tokens, log_probs, text.num_context, 0).continuation
                for text, log_probs in zip(bare_texts, bare_results[place], strict=True)
            ]
        parts = zip(group.texts, results[place], record.choices, bare, strict=True)
        found.append(
            [
                ScoredText(text.tokens, log_probs, text.num_context, len(choice.bare), unconditional)
                for text, log_probs, choice, unconditional in parts
            ]
        )
    return found
