"""Scores of prepared records by a model, on one rank or shared among several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from smlp.evaluation.zeroshot.partial import KeptBatches
from smlp.evaluation.zeroshot.prepare import Prepared
from smlp.evaluation.zeroshot.rules import ScoredText
from smlp.inference.scoring.candidates import CandidateScorer
from smlp.inference.scoring.texts import Candidates
from smlp.launch.team import Team


def score_groups(
    scorer: CandidateScorer,
    groups: Sequence[Candidates],
    batch_tokens: int,
    team: Team,
    scored: Callable[[int], None] | None = None,
    kept: KeptBatches | None = None,
) -> list[list[np.ndarray]]:
    """Log-probabilities of all groups in their order, the same on every rank and for every number of ranks: the batches
    are those of one rank, dealt out in turn, whether or not some of them are known from a run that was stopped.

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
    if scored is not None and by_batch:
        scored(sum(map(len, by_batch.values())))
    missing = [number for number in range(len(batches)) if number not in by_batch]
    for first in range(0, len(missing), team.size):
        now = missing[first : first + team.size]
        own = None
        if team.rank < len(now):
            scores = scorer.score_within_memory(groups, batches[now[team.rank]], batch_tokens)
            own = [[candidate.log_probs for candidate in group] for group in scores]
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
    team: Team | None = None,
    scored: Callable[[int], None] | None = None,
    kept: tuple[KeptBatches, KeptBatches] | None = None,
) -> list[list[ScoredText]]:
    """Every candidate of every record as the rules need it; ``kept`` has batches with and without contexts."""
    team = team or Team()
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
