"""What the JSON files of an experiment hold, as far as it is read again, and what is wrong with one that is damaged.

A shape is a type, or a tuple of types; ``[shape]`` a list, ``[shape, 1]`` one of at least one item; ``{name: shape}``
an object with these names among others; :class:`Each` an object of any names; :class:`Maybe` a value that may be null
or missing; :class:`Finite` a number; :class:`FolderName` the name of a folder in the experiment's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from smlp.errors import UserError
from smlp.files import plain_name

_MOST = 1 << 64  # of whole and of finite numbers: what is written here is far below it
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
class Finite:
    """A number above a bound, neither infinite nor not-a-number."""

    above: float = -math.inf


@dataclass(frozen=True)
class FolderName:
    """The name of a folder, not its path."""


#: also what a loss is where a run diverged
_NUMBER = (int, float)
_MODEL = {
    **{"name": str, "folder": FolderName(), "arch": str, "config": dict, "flops_per_token": Finite(above=0)},
    **{
        "parameters": {"total": Finite(), "expert_per_rank": Maybe(Finite()), "other": Maybe(Finite())},
        "family": Maybe(str),
        "overrides": Maybe(dict),
        "recipe": Maybe([str]),
    },
}
EXPERIMENT = {
    **{"models": [_MODEL, 1], "seeds": [int, 1], "updates": int, "tokens_per_update": int, "tokens_per_sample": int},
    **{"name": Maybe(str), "title": Maybe(str), "max_spread": Maybe(Finite()), "log_interval": Maybe(int)},
    **{"evaluation_subsets": Maybe([str]), "targets": Maybe([Finite()])},
}
RUN = {
    **{"state": str, "message": Maybe(str), "peak_memory_mib": Maybe(Finite()), "made_with": Maybe(dict)},
    **{"attempts": Maybe([{"step": Maybe(str), "seconds": Maybe(Finite())}]), "submitted": Maybe([int])},
}
_LOSSES = {"nll_all": Maybe(_NUMBER), "nll_after_prefix": Maybe(_NUMBER), "tokens": Maybe(int), "words": Maybe(int)}
SCORES = {"subsets": Each(_LOSSES), "prefix": Maybe(int), "num_updates": Maybe(int)}
_SPLIT = {"tokens": Maybe(int), "words": Maybe(int), "words_per_token": Maybe(Finite())}
DATA = {"splits": Each(Maybe(_SPLIT))}
_PLACE = ("jobs", "threads", "cores", "world_size")
ENVIRONMENT = {"git": Maybe(dict), "gpus": Maybe([str]), **dict.fromkeys(_PLACE, Maybe(int))}
TUNED = {"option": str, "values": list, "results": Each(dict), "chosen": dict, "updates": int, "seed": int}
SPEED = {"models": Each({"tokens_per_update": Finite()})}
ZEROSHOT = {"tasks": Maybe(Each(dict))}
ORDER_LINE = {"update": int, "digest": int}
_FLOPS = dict.fromkeys(("nominal_flops", "realised_flops", "ratio"), Maybe(_NUMBER))
_FIGURES = ("drop_share", "dead_experts", "max_over_mean", "load_cv", "gate_entropy", "margin", "churn")
_LAYER = {"router": Maybe(str), "num_experts": int, **dict.fromkeys(_FIGURES, Maybe(_NUMBER))}
HEALTH_LINE = {
    **{"update": int, "tokens": Maybe(Finite()), "work": Maybe(_FLOPS)},
    **{"pooled": Maybe(Each(Maybe(_NUMBER))), "layers": Maybe(Each(_LAYER))},
}


def wrong(value: Any, shape: Any, name: str = "") -> str:
    """What is wrong with a value, with the name of the place: "" if nothing is."""
    if isinstance(shape, Maybe):
        return "" if value is None else wrong(value, shape.shape, name)
    if isinstance(shape, Finite):
        problem = wrong(value, _NUMBER, name) or ("" if abs(value) < _MOST else f"{name} is out of range")
        return problem or ("" if value > shape.above else f"{name} must be above {shape.above:g}, got {value}")
    if isinstance(shape, FolderName):
        try:
            plain_name(value, name)
        except UserError:
            return f"{name} is no name of a folder"
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
