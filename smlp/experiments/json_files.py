"""Read and write the JSON files of an experiment, and name what is wrong with a damaged one.

A shape is a type or a tuple of types; ``[shape]`` is a list and ``[shape, 1]`` one of at least one item;
``{name: shape}`` is an object with these names among others; :class:`Each` is an object of any names; :class:`Maybe` is
a value that may be null or missing; :class:`Exact` has no infinite numbers; :class:`Finite` is a number;
:class:`FolderName` is the name of a folder in that of the experiment.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smlp.errors import UserError
from smlp.files import is_missing, plain_name, read_bytes, read_text, write_whole

_MOST = 1 << 63  # larger than any number written here
_KINDS = {str: "text", int: "a whole number", float: "a number", list: "a list", dict: "names with values"}


@dataclass(frozen=True)
class Each:
    """An object whose values have a shape, whatever their names."""

    shape: Any


@dataclass(frozen=True)
class Maybe:
    """A value that may be null or missing."""

    shape: Any


@dataclass(frozen=True)
class Exact:
    """A shape whose numbers, also those that it does not name, are neither infinite nor not-a-number."""

    shape: Any


@dataclass(frozen=True)
class Finite:
    """A number within bounds, neither infinite nor not-a-number; ``kind`` is ``int`` for a whole one."""

    above: float = -math.inf
    least: float = -math.inf
    kind: Any = (int, float)


@dataclass(frozen=True)
class FolderName:
    """The name of a folder, not its path."""


#: any number; the loss of a diverged run may be infinite or not-a-number
_NUMBER = (int, float)
COUNT = Finite(least=1, kind=int)
_MODEL = {
    **{"name": str, "folder": FolderName(), "arch": str, "config": dict, "flops_per_token": Finite(above=0)},
    **{
        "parameters": {"total": Finite(), "expert_per_rank": Maybe(Finite()), "other": Maybe(Finite())},
        "family": Maybe(str),
        "overrides": Maybe(dict),
        "recipe": Maybe([str]),
    },
}
_COUNTS = ("updates", "tokens_per_update", "tokens_per_sample")
EXPERIMENT = {
    **{"models": [_MODEL, 1], "seeds": [int, 1], **dict.fromkeys(_COUNTS, COUNT)},
    **{"name": Maybe(str), "title": Maybe(str), "max_spread": Maybe(Finite()), "log_interval": Maybe(int)},
    **{"evaluation_subsets": Maybe([FolderName(), 1]), "targets": Maybe([Finite(above=0)])},
}
RUN = {
    **{
        "state": str,
        "message": Maybe(str),
        "peak_memory_mib": Maybe(Finite()),
        "made_with": Maybe({"settings": Maybe(dict)}),
    },
    **{"attempts": Maybe([{"step": Maybe(str), "seconds": Maybe(Finite())}]), "submitted": Maybe([int])},
}
_LOSSES = {"nll_all": Maybe(_NUMBER), "nll_after_prefix": Maybe(_NUMBER), "tokens": Maybe(int), "words": Maybe(int)}
SCORES = {"subsets": Each(_LOSSES), "prefix": Maybe(int), "num_updates": Maybe(int)}
_SPLIT = {"tokens": Maybe(int), "words": Maybe(int), "words_per_token": Maybe(Finite()), "bytes": Maybe(int)}
DATA = {"splits": Each(Maybe(_SPLIT)), "vocab_size": Maybe(int)}
_PLACE = ("jobs", "threads", "cores", "world_size")
_GIT = {"revision": Maybe(str), "difference_sha256": Maybe(str)}
_MACHINE = {"git": Maybe(_GIT), **dict.fromkeys(_PLACE, Maybe(int)), **dict.fromkeys(("processor", "gpu"), Maybe(str))}
ENVIRONMENT = Exact({"gpus": Maybe([str]), **_MACHINE})
#: a line of environment.jsonl
START = Exact(_MACHINE)
_GRID = {"option": str, "values": list, "chosen": dict, "updates": int, "seed": int, "subset": Maybe(str)}
TUNED = Exact({**_GRID, "results": Each(Each(Maybe(_NUMBER)))})
SPEED = {
    "models": Each({"tokens_per_update": Finite(above=0), "seconds_per_update": [Finite(above=0)]}),
    **{"core_share": Maybe(Finite()), "environment": Maybe(ENVIRONMENT)},
}
_SHARES = {"accuracy": Maybe(Finite()), "chance": Maybe(Finite())}
ZEROSHOT = {"tasks": Each({"n": int, **_SHARES}), "settings": Maybe(dict)}
ORDER_LINE = {"update": int, "digest": int}
TIME_LINE = {"update": int, "tokens": COUNT, "seconds": Finite(least=0)}
_FLOPS = dict.fromkeys(("nominal_flops", "realised_flops", "ratio"), Maybe(_NUMBER))
_FIGURES = ("drop_share", "dead_experts", "max_over_mean", "load_cv", "gate_entropy", "margin", "churn")
_LAYER = {"router": Maybe(str), "num_experts": int, **dict.fromkeys(_FIGURES, Maybe(_NUMBER))}
HEALTH_LINE = {
    **{"update": int, "tokens": Maybe(Finite()), "work": Maybe(_FLOPS)},
    **{"pooled": Maybe(Each(Maybe(_NUMBER))), "layers": Maybe(Each(_LAYER))},
}


def wrong(value: Any, shape: Any, name: str = "") -> str:
    """Say what is wrong with a value, and where; "" if nothing is."""
    if isinstance(shape, Maybe):
        return "" if value is None else wrong(value, shape.shape, name)
    if isinstance(shape, Exact):
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            return f"{name or 'it'} has a number that is infinite or not-a-number"
        return wrong(value, shape.shape, name)
    if isinstance(shape, Finite):
        problem = wrong(value, shape.kind, name) or ("" if abs(value) < _MOST else f"{name} is out of range")
        if problem or value <= shape.above:
            return problem or f"{name} must be above {shape.above:g}, got {value}"
        return "" if value >= shape.least else f"{name} must be at least {shape.least:g}, got {value}"
    if isinstance(shape, FolderName):
        try:
            plain_name(value, name)
        except UserError:
            return f"{name} is not a folder name"
        return ""
    kind = list if isinstance(shape, list) else dict if isinstance(shape, dict | Each) else shape
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or isinstance(value, bool):
        return f"{name or 'it'} must be {_KINDS[kinds[-1]]}"
    if isinstance(value, int) and abs(value) >= _MOST:
        return f"{name} is out of range"
    if isinstance(shape, list):
        if len(value) < sum(shape[1:]):
            return f"{name} is empty"
        found = (wrong(item, shape[0], f"{name}[{number}]") for number, item in enumerate(value))
    elif isinstance(shape, Each):
        found = (wrong(item, shape.shape, _joined(name, key)) for key, item in value.items())
    elif isinstance(shape, dict):
        found = (wrong(value.get(key), inner, _joined(name, key)) for key, inner in shape.items())
    else:
        return ""
    return next(filter(None, found), "")


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def read_json(path: Path, shape: Any = dict) -> Any:
    """Read a file and check its shape.

    Raises:
        UserError: it cannot be read, or is damaged.
    """
    found, problem = _read(path, shape)
    if problem:
        raise UserError(f"{path} {problem}")
    return found


def _read(path: Path, shape: Any) -> tuple[Any, str]:
    """Return what a file holds, and what is wrong with it."""
    try:
        found = json.loads(read_text(path))
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    except RecursionError:
        return None, "is damaged: it is nested too deep"
    except ValueError as error:
        return None, f"is damaged: it is not JSON ({error})"
    problem = wrong(found, shape)
    return found, f"is damaged: {problem}" if problem else ""


def write_json(path: Path, value: Any) -> None:
    """Write a file whole or not at all."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    write_whole(path, text.encode())


def read_json_or_note(path: Path, notes: list[str], shape: Any = dict) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if it is missing or damaged. Damage is noted, with the file's name.

    Args:
        path: of the file.
        notes: takes what is wrong with it.
        shape: what the file should hold.
    """
    if is_missing(path):
        return None
    found, problem = _read(path, shape)
    if problem:
        notes.append(f"{path.name} {problem}")
    return None if problem else found


def read_lines_and_note(path: Path, notes: list[str], shape: Any = dict) -> list[dict[str, Any]]:
    """Read a file with an object in each line; damaged lines are left out and counted in a note."""
    try:
        lines = read_bytes(path).decode(errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror})")
        return []
    found, damaged = [], 0
    for line in filter(str.strip, lines):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not wrong(record, shape):
            found.append(record)
        else:
            damaged += 1
    if damaged:
        notes.append(f"{path.name}: {damaged} of {len(found) + damaged} lines are damaged and left out")
    return found
