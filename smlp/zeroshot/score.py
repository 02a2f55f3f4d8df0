"""Scores of prepared records by a model, on one rank or shared among several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from smlp.launch.team import Team
from smlp.scoring.candidates import CandidateScorer, TokenScores
from smlp.scoring.texts import Candidates
from smlp.zeroshot.prepare import Prepared
from smlp.zeroshot.rules import ScoredText


def score_groups(
    scorer: CandidateScorer,
    groups: Sequence[Candidates],
    batch_tokens: int,
    team: Team,
    scored: Callable[[int], None] | None = None,
) -> list[list[TokenScores]]:
    """Scores of all groups in their order, the same on every rank and for every number of ranks: the batches are those
    of one rank, dealt out in turn.

    Args:
        scorer: with the model.
        groups: of candidates.
        batch_tokens: positions in a batch.
        team: ranks that share the work.
        scored: called with the number of groups that this rank has scored since the last call.

    Raises:
        UserError: a batch does not fit into memory.
    """
    own = {}
    for place, scores in scorer.each(groups, batch_tokens, team.rank, team.size):
        own[place] = scores
        if scored is not None:
            scored(1)
    found = {place: result for part in team.gather(own) for place, result in part.items()}
    return [found[place] for place in range(len(groups))]


def score_prepared(
    scorer: CandidateScorer,
    prepared: Prepared,
    batch_tokens: int,
    team: Team | None = None,
    scored: Callable[[int], None] | None = None,
) -> list[list[ScoredText]]:
    """Every candidate of every record as the rules need it."""
    team = team or Team()
    results = score_groups(scorer, prepared.groups, batch_tokens, team, scored)
    bare_results = score_groups(scorer, prepared.bare_groups, batch_tokens, team)
    found = []
    for place, (record, group) in enumerate(zip(prepared.examples, prepared.groups, strict=True)):
        bare: list[float | None] = [None] * len(group.texts)
        if bare_results:
            bare_texts = prepared.bare_groups[place].texts
            bare = [
                ScoredText(text.tokens, result.log_probs, text.num_context, 0).continuation
                for text, result in zip(bare_texts, bare_results[place], strict=True)
            ]
        parts = zip(group.texts, results[place], record.choices, bare, strict=True)
        found.append(
            [
                ScoredText(text.tokens, result.log_probs, text.num_context, len(choice.bare), unconditional)
                for text, result, choice, unconditional in parts
            ]
        )
    return found
