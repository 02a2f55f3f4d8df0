"""One task from its files to a choice for every record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from smlp.errors import UserError
from smlp.evaluation.zeroshot.partial import PartialScores
from smlp.evaluation.zeroshot.readers import READERS, distinct, without_id
from smlp.evaluation.zeroshot.rules import RULES, ScoredText, choice, headline_rule, scores
from smlp.evaluation.zeroshot.score import UNCONDITIONAL_CONTEXT, Prepared, prepare, score_prepared
from smlp.evaluation.zeroshot.templates import Example, draw_shots, example, primed
from smlp.inference.scoring.candidates import CandidateScorer
from smlp.inference.scoring.texts import Encoding
from smlp.launch.team import Team

_T = TypeVar("_T")


@dataclass(frozen=True)
class Protocol:
    """Settings for putting a task to a model."""

    templates: str = "fair"
    #: a key of ``RULES``, or "auto" for the one with which the templates' authors report accuracy
    scoring: str = "auto"
    #: None for the task's usual split
    split: str | None = None
    #: most records, from the start of the file; None for all
    limit: int | None = None
    num_fewshot: int = 0
    fewshot_seed: int = 1
    skip_too_long: bool = False

    def rule(self, task: str) -> str:
        """Return the rule that decides."""
        return headline_rule(task, self.templates) if self.scoring == "auto" else self.scoring


@dataclass(frozen=True)
class Task:
    """A task's records, read and made ready for a model."""

    name: str
    split: str
    #: split of the few-shot examples; None if there are none
    fewshot_split: str | None
    #: the rule that decides
    rule: str
    prepared: Prepared
    #: distinct records of the split, regardless of the limit; and the number of further lines that repeat one of them
    num_records: int
    num_repeated: int
    #: records that repeat another one under a different id, or share the id of another one with different content
    num_alike: int
    num_shared_ids: int


@dataclass(frozen=True)
class Answer:
    """A model's scores of one record's candidates, and its choice."""

    example: Example
    texts: tuple[ScoredText, ...]
    #: score of every candidate by every applicable rule
    scores: dict[str, list[float]]
    #: index of the chosen candidate, by rule
    chosen: dict[str, int]

    def is_right(self, rule: str) -> bool:
        """Return whether the rule chooses a right candidate."""
        return self.chosen[rule] in self.example.gold


def read_task(name: str, data_dir: str | Path, protocol: Protocol, encoding: Encoding) -> Task:
    """Read a task's files and make its records ready.

    Raises:
        UserError: a file is missing or malformed, or records do not fit the model.
    """
    reader = READERS[name]
    split = protocol.split or next(iter(reader.splits))
    lines = reader.read(data_dir, split)
    records = distinct(lines)
    found = records[: protocol.limit]
    shots, fewshot_split = [], None
    if protocol.num_fewshot:
        fewshot_split = reader.priming_split(data_dir)
        pool = distinct(reader.read(data_dir, fewshot_split))
        shots = draw_shots(pool, records, protocol.num_fewshot, protocol.fewshot_seed, protocol.templates)
    examples = (primed(example(item, protocol.templates), shots, protocol.fewshot_seed) for item in found)
    rule = protocol.rule(name)
    bare = UNCONDITIONAL_CONTEXT[protocol.templates] if rule == "unconditional" else None
    prepared = prepare(name, examples, encoding, bare, protocol.skip_too_long)
    return Task(
        name,
        split,
        fewshot_split,
        rule,
        prepared,
        num_records=len(records),
        num_repeated=len(lines) - len(records),
        num_alike=len(found) - len(set(map(without_id, found))),
        num_shared_ids=len(found) - len({item.id for item in found}),
    )


def for_each_task(names: Sequence[str], read: Callable[[str], _T]) -> dict[str, _T]:
    """Call ``read`` on each task and return the results by name.

    Raises:
        UserError: the message says what is wrong with each task, one line each if there are several.
    """
    found, problems = {}, []
    for name in names:
        try:
            found[name] = read(name)
        except UserError as error:
            problems.append(str(error))
    distinct_problems = list(dict.fromkeys(problems))
    if len(distinct_problems) > 1:
        listed = "".join(f"\n  {problem}" for problem in distinct_problems)
        raise UserError(f"{len(problems)} of {len(names)} tasks cannot be scored:{listed}")
    if problems:
        raise UserError(problems[0])
    return found


def answer_task(
    task: Task,
    scorer: CandidateScorer,
    batch_tokens: int,
    team: Team,
    scored: Callable[[int], None],
    kept: PartialScores | None,
) -> list[Answer]:
    """Return the model's choice for every record, in the order of the file.

    Args:
        task: from :func:`read_task`.
        scorer: with the model.
        batch_tokens: positions in a batch.
        team: ranks that share the work; all get the result.
        scored: called with the number of records that have been scored since the last call, by all ranks.
        kept: the scores of an earlier run that was stopped, to which those of this one are added; None to keep none.

    Raises:
        UserError: the model's numbers are NaN or infinite.
    """
    found = score_prepared(scorer, task.prepared, batch_tokens, team, scored, kept and kept.of(task.name))
    return [_answer(task, record, texts) for record, texts in zip(task.prepared.examples, found, strict=True)]


def _answer(task: Task, record: Example, texts: Sequence[ScoredText]) -> Answer:
    rules = [rule for rule in RULES if rule != "unconditional" or task.rule == "unconditional"]
    try:
        by_rule = {rule: scores(rule, texts) for rule in rules}
    except FloatingPointError as error:
        raise UserError(f"{task.name}, example {record.id}: {error}; the model's weights may be broken") from None
    return Answer(record, tuple(texts), by_rule, {rule: choice(found) for rule, found in by_rule.items()})
