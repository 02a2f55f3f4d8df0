"""Whether training can resume from what a checkpoint says of its progress."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: numbers that training resumes from: the way to each in a checkpoint (-1: the last of a list), and its least value
_NUMBERS = (
    (("optimizer_history", -1, "num_updates"), 0),
    (("extra_state", "train_iterator", "epoch"), 1),
    (("extra_state", "train_iterator", "iterations_in_epoch"), 0),
)
#: what must be a dictionary, or missing
_MAPPINGS = (
    ("extra_state",),
    ("extra_state", "train_iterator"),
    ("extra_state", "metrics"),
    ("optimizer_history", -1),
    ("optimizer_history", -1, "lr_scheduler_state"),
    ("last_optimizer_state",),
)
_ABSENT = object()


def progress_problems(state: Any, path: str | Path) -> list[str]:
    """Return what training could not resume from, one sentence each.

    Args:
        state: of a checkpoint of fairseq; what it lacks is left to fairseq, which knows checkpoints of other times.
        path: of the checkpoint.
    """
    if not isinstance(state, Mapping):
        return []
    problems = []
    if not isinstance(state.get("optimizer_history") or [], list):
        problems.append(f"{path} is damaged: optimizer_history is {state['optimizer_history']!r:.60}, not a list")
    for way in _MAPPINGS:
        value = _at(state, way)
        if value is not _ABSENT and value is not None and not isinstance(value, Mapping):
            problems.append(f"{path} is damaged: {_shown(way)} is {value!r:.60}, not a dictionary")
    for way, least in _NUMBERS:
        value = _at(state, way)
        if value is not _ABSENT and not (type(value) is int and value >= least):
            problems.append(
                f"{path} is damaged: {_shown(way)} is {value!r:.60}, but must be a whole number of at least {least}"
            )
    best = _at(state, ("extra_state", "best"))
    if best is not _ABSENT and best is not None and not _is_number(best):
        problems.append(f"{path} is damaged: extra_state.best is {best!r:.60}, not a number")
    moments = _at(state, ("last_optimizer_state", "state"))
    if moments is not _ABSENT and not _is_by_parameter(moments):
        problems.append(f"{path} is damaged: the optimizer's state in it is not kept by parameter")
    return problems


def moment_problems(state: Any, path: str | Path) -> list[str]:
    """Return which parameters lack a moment of the optimizer that others have, one sentence each.

    Args:
        state: of a checkpoint, with all its experts, of which :func:`progress_problems` finds nothing.
        path: of the checkpoint.
    """
    moments = _at(state, ("last_optimizer_state", "state"))
    if moments is _ABSENT or not moments:
        return []
    # an optimizer may keep other moments of matrices than of vectors, but the same of all matrices
    kinds: dict[int, set[str]] = {}
    for of_parameter in moments.values():
        kinds.setdefault(_num_dims(of_parameter), set()).update(of_parameter)
    of_all = set.intersection(*(names for dims, names in kinds.items() if dims > 0 or len(kinds) == 1))
    problems = []
    for number, of_parameter in moments.items():
        lacking = sorted((kinds[_num_dims(of_parameter)] | of_all) - of_parameter.keys())
        if lacking:
            problems.append(
                f"{path} is damaged: the optimizer's state of parameter {number} lacks {', '.join(lacking)}, which it "
                "has of others; --reset-optimizer begins with new moments"
            )
        elif not _is_number(of_parameter.get("step", 0)):
            problems.append(
                f"{path} is damaged: the optimizer's step of parameter {number} is {of_parameter['step']!r:.60}, not a "
                "number; --reset-optimizer begins with new moments"
            )
    return problems


def _is_by_parameter(moments: Any) -> bool:
    return isinstance(moments, Mapping) and all(isinstance(value, Mapping) for value in moments.values())


def _is_number(value: Any) -> bool:
    """Whether it is a number, or a tensor of one."""
    return (isinstance(value, numbers.Real) and not isinstance(value, bool)) or getattr(value, "shape", None) == ()


def _num_dims(of_parameter: Mapping[str, Any]) -> int:
    """Dimensions of the moments; 0 where there is none."""
    return max((len(value.shape) for value in of_parameter.values() if hasattr(value, "shape")), default=0)


def _at(state: Any, way: Sequence[str | int]) -> Any:
    for step in way:
        found = isinstance(state, list) and bool(state) if step == -1 else isinstance(state, Mapping) and step in state
        if not found:
            return _ABSENT
        state = state[step]
    return state


def _shown(way: Sequence[str | int]) -> str:
    return ".".join(str(step) for step in way if isinstance(step, str))
