"""Translate a task's ``generation_kwargs`` into the settings of :mod:`smlp.inference.generation`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smlp.errors import UserError
from smlp.inference.generation.continuations import StopStrings

#: names by which tasks limit the number of new tokens; the first one given counts
_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DEFAULT_MAX_TOKENS = 256
#: types of the settings for drawing, by field of :class:`smlp.inference.generation.Sampling`; unused without do_sample
_DRAWING = {"temperature": (int, float), "top_k": (int,), "top_p": (int, float), "seed": (int,)}
_NUMBERS = {
    **_DRAWING,
    **dict.fromkeys((*_MAX_TOKENS, "num_beams"), (int,)),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), (int, float)),
}
_KNOWN = ("until", "do_sample", *_NUMBERS)


@dataclass(frozen=True)
class WritingOrder:
    """Settings for writing texts."""

    max_tokens: int
    #: strings before which a text ends
    stop: tuple[str, ...]
    #: settings of :func:`smlp.inference.generation.method_of`
    method: dict[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any], task: str) -> WritingOrder:
        """Return settings as the harness reads them: without ``do_sample``, tokens are drawn if there is a temperature.

        Args:
            given: generation_kwargs; None counts as not given.
            task: for messages.

        Raises:
            UserError: there is a name that is not known, or a value of another kind.
        """
        given = {name: value for name, value in given.items() if value is not None}
        unknown = [name for name in given if name not in _KNOWN]
        if unknown:
            raise UserError(
                f"{task}: generation_kwargs has {', '.join(map(repr, unknown))}, which is not supported here; "
                f"supported are {', '.join(_KNOWN)}"
            )
        for name, kinds in _NUMBERS.items():
            if name in given and (not isinstance(given[name], kinds) or isinstance(given[name], bool)):
                raise UserError(f"{task}: generation_kwargs has {name} {given[name]!r}, which is not a valid number")
        stop = given.get("until") or ()
        stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else (stop,)
        if not all(isinstance(text, str) for text in stop):
            raise UserError(
                f"{task}: generation_kwargs has until {given['until']!r}, which is neither text nor a list of texts"
            )
        draws = given.get("do_sample", given.get("temperature", 0) > 0)
        if not isinstance(draws, bool):
            raise UserError(f"{task}: generation_kwargs has do_sample {draws!r}, which is neither true nor false")
        if given.get("num_beams", 1) > 1 and given.get("do_sample"):
            beam = f"beam={given['num_beams']}"
            raise UserError(
                f"{task}: generation_kwargs: {beam} does not sample tokens, so it cannot be combined with do_sample"
            )
        max_tokens = next((given[name] for name in _MAX_TOKENS if name in given), _DEFAULT_MAX_TOKENS)
        return cls(max_tokens, tuple(text for text in stop if text), _method(given, draws))

    def until_stop(self, text: str) -> str:
        """Return a text up to its first stop string."""
        stops = StopStrings(self.stop)
        return stops.push(text) + stops.rest()


def _method(given: Mapping[str, Any], draws: bool) -> dict[str, Any]:
    method = {name: given[name] for name in ("repetition_penalty", "length_penalty") if name in given}
    if draws:
        method |= {name: given[name] for name in _DRAWING if name in given}
    if given.get("num_beams", 1) != 1:
        return {**method, "beam": given["num_beams"]}
    return method if draws else {**method, "temperature": 0}
