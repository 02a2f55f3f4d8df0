"""Prompts: write the texts that a model scores, with solved examples before them on request.

Three sets, named after who uses them (docs: where they differ and why it matters):

fair      those of Artetxe et al. (2021), with whose numbers the paper compares; the default
gpt3      those of GPT-3 (Brown et al., 2020, appendix G)
lm-eval   those of lm-evaluation-harness 0.4

Few-shot priming follows the code of Artetxe et al. (2021): solved examples are joined by a space, the same ones stand
before every record of a task, and their order is drawn anew for each record.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from smlp.errors import UserError
from smlp.evaluation.zeroshot.readers import (
    CopaItem,
    HellaSwagItem,
    Item,
    PiqaItem,
    RecordItem,
    StoryClozeItem,
    WinograndeItem,
    without_id,
)

_BLANK, _PLACEHOLDER, _HIGHLIGHT = "_", "@placeholder", "@highlight"


@dataclass(frozen=True)
class Candidate:
    """One candidate in its place. The model sees ``context + continuation``; white space belongs to the latter."""

    context: str
    #: the text from the candidate on, which is scored
    continuation: str
    #: the candidate alone, as in the data
    bare: str
    #: the part of the continuation after the candidate
    tail: str = ""

    @property
    def alone(self) -> str:
        """Return the candidate as it is written in its place, or as in the data if it stands in the context."""
        return self.continuation.removesuffix(self.tail).strip() or self.bare


@dataclass(frozen=True)
class Example:
    """A record with its candidates written out."""

    item: Item
    choices: tuple[Candidate, ...]
    #: indices of the correct candidates
    gold: tuple[int, ...]

    @property
    def id(self) -> str:
        """Return the id of the record."""
        return self.item.id


def _filled(before: str, candidate: str, bare: str, after: str = "") -> Candidate:
    """Return a candidate between two texts; white space at the end of the first goes to the continuation."""
    context = before.rstrip()
    return Candidate(context, before[len(context) :] + candidate + after, bare, after)


def _lower_first_word(text: str) -> str:
    first, space, rest = text.partition(" ")
    return (first if first == "I" else first.lower()) + space + rest


def _copa(item: CopaItem) -> Iterator[Candidate]:
    premise = item.premise.rstrip()
    before = f"{premise.removesuffix('.')} {'because' if item.question == 'cause' else 'so'} "
    for choice in item.choices:
        yield _filled(before, _lower_first_word(choice), choice)


def _piqa(item: PiqaItem) -> Iterator[Candidate]:
    for solution in item.solutions:
        yield _filled(f"{item.goal.strip()} ", solution, solution)


def _storycloze(item: StoryClozeItem) -> Iterator[Candidate]:
    for ending in item.endings:
        yield _filled(" ".join(item.sentences) + " ", ending, ending)


def _winogrande(item: WinograndeItem) -> Iterator[Candidate]:
    before, _, after = item.sentence.partition(_BLANK)
    for option in item.options:
        yield _filled(before, option, option, after)


def _winogrande_partial(item: WinograndeItem) -> Iterator[Candidate]:
    """Yield candidates whose option stands in the context; the rest of the sentence is scored."""
    before, _, after = item.sentence.partition(_BLANK)
    for option in item.options:
        yield Candidate(before + option, after, option, after)


def _hellaswag(item: HellaSwagItem) -> Iterator[Candidate]:
    scene = f"{item.activity}: {item.ctx_a} {item.ctx_b[:1].upper()}{item.ctx_b[1:]}"
    for ending in item.endings:
        yield _filled(" ".join(scene.split()) + " ", ending, ending)


def _record(item: RecordItem) -> Iterator[Candidate]:
    before, after = item.query.split(_PLACEHOLDER)
    passage = item.passage.replace(_HIGHLIGHT, "")
    for entity in item.entities:
        yield _filled(f"{passage} {before}", entity, entity, after)


def _record_listed(item: RecordItem) -> Iterator[Candidate]:
    """Write highlights as the lines of a list, and the query as one more."""
    passage, *highlights = item.passage.split(f"\n{_HIGHLIGHT}\n")
    context = passage + "".join(f"\n- {highlight}" for highlight in highlights)
    for entity in item.entities:
        yield Candidate(context, f"\n- {item.query.replace(_PLACEHOLDER, entity)}", entity)


def _copa_harness(item: CopaItem) -> Iterator[Candidate]:
    context = f"{item.premise.strip()[:-1]} {'because' if item.question == 'cause' else 'therefore'}"
    for choice in item.choices:
        yield Candidate(context, f"  {choice[:1].lower()}{choice[1:]}", choice)  # its own space, and the harness's


def _piqa_harness(item: PiqaItem) -> Iterator[Candidate]:
    for solution in item.solutions:
        yield Candidate(f"Question: {item.goal}\nAnswer:", f" {solution}", solution)


def _winogrande_harness(item: WinograndeItem) -> Iterator[Candidate]:
    before, _, after = item.sentence.partition(_BLANK)
    for option in item.options:
        rest = f" {after.strip()}"
        yield Candidate(before + option, rest, option, rest)


def _without_brackets(text: str) -> str:
    lines = (line.rpartition("]") for line in text.strip().replace(" [title]", ". ").split("\n"))
    # behind the last "]" of a line, each "[" would cost a search to its end
    shorter = "\n".join(re.sub(r"\[.*?\]", "", before + bracket) + rest for before, bracket, rest in lines)
    return shorter.replace("  ", " ")


def _hellaswag_harness(item: HellaSwagItem) -> Iterator[Candidate]:
    context = _without_brackets(f"{item.activity}: {item.ctx_a} {item.ctx_b.capitalize()}")
    for ending in item.endings:
        clean = _without_brackets(ending)
        yield _filled(context, f" {clean}", clean)


def _record_harness(item: RecordItem) -> Iterator[Candidate]:
    passage, *highlights = item.passage.strip().split(f"\n{_HIGHLIGHT}\n")
    before = passage + "\n\n" + "".join(f"  - {highlight}.\n" for highlight in highlights)
    for entity in sorted(item.entities):
        yield _filled(before, f"   - {item.query.replace(_PLACEHOLDER, entity)}", entity)


Template = Callable[[Item], Iterator[Candidate]]

_FAIR: dict[type[Item], Template] = {
    CopaItem: _copa,
    PiqaItem: _piqa,
    StoryClozeItem: _storycloze,
    WinograndeItem: _winogrande,
    HellaSwagItem: _hellaswag,
    RecordItem: _record,
}
TEMPLATES: dict[str, dict[type[Item], Template]] = {
    "fair": _FAIR,
    "gpt3": {**_FAIR, WinograndeItem: _winogrande_partial, RecordItem: _record_listed},
    "lm-eval": {
        CopaItem: _copa_harness,
        PiqaItem: _piqa_harness,
        StoryClozeItem: _storycloze,
        WinograndeItem: _winogrande_harness,
        HellaSwagItem: _hellaswag_harness,
        RecordItem: _record_harness,
    },
}


def example(item: Item, templates: str = "fair") -> Example:
    """Return the texts of a record's candidates.

    Args:
        item: a record of any of the six tasks.
        templates: a key of ``TEMPLATES``.
    """
    choices = tuple(TEMPLATES[templates][type(item)](item))
    if isinstance(item, RecordItem):
        return Example(item, choices, tuple(n for n, choice in enumerate(choices) if choice.bare in item.answers))
    return Example(item, choices, (item.gold,))


_JOINT = " "


def draw_shots(pool: Sequence[Item], evaluated: Sequence[Item], count: int, seed: int, templates: str) -> list[str]:
    """Return the texts of ``count`` solved examples that differ, none of which is evaluated.

    Args:
        pool: records of the split for priming.
        evaluated: records that will be scored.
        count: K.
        seed: the same seed draws the same ones.
        templates: a key of ``TEMPLATES``.

    Raises:
        UserError: there are fewer.
    """
    known = {without_id(item) for item in evaluated}
    order = list(pool)
    random.Random(seed).shuffle(order)
    free = list({without_id(item): item for item in order if without_id(item) not in known}.values())
    if len(free) < count:
        raise UserError(
            f"--num-fewshot {count}, but the split to take examples from has {len(free)} that are not among those "
            "scored (all of their split, whatever --limit)"
        )
    return [_solved(example(item, templates)) for item in free[:count]]


def _solved(solved: Example) -> str:
    right = solved.choices[solved.gold[0]]
    return (right.context + right.continuation).strip()


def primed(unsolved: Example, shots: Sequence[str], seed: int) -> Example:
    """Return the record with the solved examples before each of its contexts."""
    if not shots:
        return unsolved
    order = list(shots)
    random.Random(f"{seed} {unsolved.id}").shuffle(order)
    before = _JOINT.join(order) + _JOINT
    choices = tuple(dataclasses.replace(choice, context=before + choice.context) for choice in unsolved.choices)
    return dataclasses.replace(unsolved, choices=choices)
