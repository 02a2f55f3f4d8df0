"""Named ranges for profilers: which layer, and which stage of it, a piece of time belongs to.

They appear in every torch profile and Chrome trace, whoever takes it, under names like ``layer 3 (tMoE) / gate``. While
no profiler is running they cost a fraction of a microsecond and leave nothing behind.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import torch

#: stages of a sparse layer: scores and auxiliary losses; assignment; sorting by expert and back; sending to the
#: experts' ranks; the experts; sending back; waiting for other ranks to arrive at the layer
STAGES = ("gate", "assignment", "permute", "all-to-all out", "experts", "all-to-all back", "skew")
GATE, ASSIGNMENT, PERMUTE, OUT, EXPERTS, BACK, SKEW = STAGES
#: everything between the backward pass and the optimizer
REDUCTION = "gradient reduction"
#: ranges around updates and their other parts, opened by the training loop
UPDATE, FORWARD, BACKWARD, OPTIMIZER = "update", "forward", "backward", "optimizer"
#: parts of the decoder outside its blocks; and the recording of router health
EMBEDDING, LOGITS, HEALTH = "embedding", "logits", "router health"

#: separator between the names of layer and stage
SEPARATOR = " / "
_BACKWARD = ", backward"
_NOTHING = nullcontext()


class _OpenNames(threading.local):
    def __init__(self) -> None:
        self.stack: list[str] = []
        #: how many of them stay undivided
        self.num_whole = 0


_open = _OpenNames()


class _Span:
    """A range of the profiler, whose name :func:`current_span` knows while it is open."""

    def __init__(self, name: str, is_whole: bool = False) -> None:
        self.name, self.is_whole = name, is_whole

    def __enter__(self) -> None:
        self.range = torch.profiler.record_function(self.name)
        self.range.__enter__()
        _open.stack.append(self.name)
        _open.num_whole += self.is_whole

    def __exit__(self, *error: object) -> None:
        _open.num_whole -= self.is_whole
        _open.stack.pop()
        self.range.__exit__(*error)


def _profiler_enabled() -> bool:
    """Return whether ranges are recorded; a compiled graph has none."""
    return not torch.compiler.is_compiling() and torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def span(name: str) -> AbstractContextManager[None]:
    """Return a range with this name; one that does nothing without a profiler and inside of :func:`whole_span`."""
    return _Span(name) if _profiler_enabled() and not _open.num_whole else _NOTHING


def whole_span(name: str) -> AbstractContextManager[None]:
    """Return a range as :func:`span` does, inside which no other opens, so that all of its time is its own."""
    return _Span(name, is_whole=True) if _profiler_enabled() else _NOTHING


def stage_of(layer: str, stage: str) -> AbstractContextManager[None]:
    """Return a range for one of the :data:`STAGES` of a layer; inner ranges take their time from outer ones."""
    return span(layer + SEPARATOR + stage) if _profiler_enabled() else _NOTHING


def stage(stage: str) -> AbstractContextManager[None]:
    """Return the range of a stage of the layer whose range is open, for code that does not know its layer."""
    if not _profiler_enabled():
        return _NOTHING
    return span((current_span() or "").partition(SEPARATOR)[0] + SEPARATOR + stage)


def current_span() -> str | None:
    """Return the name of the innermost open range of this thread."""
    return _open.stack[-1] if _open.stack else None


def backward_of(name: str | None) -> AbstractContextManager[None]:
    """Return a range for what an operation does in the backward pass.

    Args:
        name: :func:`current_span` of its forward pass.
    """
    return span(name + _BACKWARD) if name is not None else _NOTHING


def split_name(name: str) -> tuple[str, str] | None:
    """Return the layer and stage that a range stands for; None if it is not a stage's.

    What follows a comma in the layer's name is a part of it, such as ``layer 3 (tMoE), shuffle``.
    """
    layer, separator, stage = name.partition(SEPARATOR)
    stage = stage.removesuffix(_BACKWARD)
    return (layer.partition(",")[0], stage) if separator and stage in STAGES else None
