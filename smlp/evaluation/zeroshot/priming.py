"""Few-shot priming: solved examples before the one to be solved.

As in the code of Artetxe et al. (2021), the examples are joined by a space, the same ones stand before every record of
a task, and their order is drawn anew for each record.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from smlp.errors import UserError
from smlp.evaluation.zeroshot.items import Item, without_id
from smlp.evaluation.zeroshot.templates import Example, example

_JOINT = " "


def draw_shots(pool: Sequence[Item], evaluated: Sequence[Item], count: int, seed: int, templates: str) -> list[str]:
    """Texts of ``count`` solved examples, none of them one that is evaluated.

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
    free = [item for item in order if without_id(item) not in known]
    if len(free) < count:
        raise UserError(
            f"--num-fewshot {count}, but the split to take examples from has {len(free)} that are not evaluated"
        )
    return [_solved(example(item, templates)) for item in free[:count]]


def _solved(solved: Example) -> str:
    right = solved.choices[solved.gold[0]]
    return (right.context + right.continuation).strip()


def primed(unsolved: Example, shots: Sequence[str], seed: int) -> Example:
    """The record with the solved examples before each of its contexts."""
    if not shots:
        return unsolved
    order = list(shots)
    random.Random(f"{seed} {unsolved.id}").shuffle(order)
    before = _JOINT.join(order) + _JOINT
    choices = tuple(dataclasses.replace(choice, context=before + choice.context) for choice in unsolved.choices)
    return dataclasses.replace(unsolved, choices=choices)
