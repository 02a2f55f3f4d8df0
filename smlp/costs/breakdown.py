"""Divide the time of an update by stage of the sparse layers, part of the update, and component of the model.

A trace is classified once (:func:`rows_of_trace`). ``smlp costs`` groups its rows by stage and part
(:func:`costs_of_trace`); ``--profile-updates`` groups them by component, with the operations of each and the rate that
the device can reach (:class:`Breakdown`). Components are the kinds of work of
:mod:`smlp.costs.component`, and whatever takes time without such work. Either way, the parts add up to the whole
update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from smlp.config import ModelConfig
from smlp.costs.component import EXPERTS, NORMS, OUTPUT, PROJECTIONS, ROUTER, SCORES, SPATIAL
from smlp.costs.formula import training_work
from smlp.costs.recording import DENSE_BLOCK, MODULE_PARTS, SPARSE_BLOCK
from smlp.costs.timeline import TraceTimeline
from smlp.parallel import spans
from smlp.parallel.spans import BACKWARD, FORWARD, SEPARATOR, STAGES, split_name

OTHER = "other"
#: parts of an update other than the stages of sparse layers
PARTS = _REST_OF_SPARSE, _DENSE, _ENDS, _, _, _ = (
    *("rest of sparse blocks", "dense blocks", "embedding, head and loss"),
    *(spans.REDUCTION, spans.OPTIMIZER, OTHER),
)
_PART_OF_RANGE = {FORWARD: _ENDS, BACKWARD: OTHER, spans.UPDATE: OTHER} | {
    name: name for name in (spans.REDUCTION, spans.OPTIMIZER)
}

EMBEDDING = "embedding"
DISPATCH = "dispatch and combine"
ALL_TO_ALL = "all-to-all"
REST_OF_BLOCKS = "rest of blocks"
REDUCTION = "gradients: reduce, clip"
#: in the order of the table's rows
COMPONENTS = (
    *(EMBEDDING, NORMS, PROJECTIONS, SPATIAL, SCORES, ROUTER, DISPATCH, EXPERTS, ALL_TO_ALL, REST_OF_BLOCKS, OUTPUT),
    *(spans.HEALTH, REDUCTION, spans.OPTIMIZER, OTHER),
)
_OF_STAGE = {
    spans.GATE: ROUTER,
    spans.ASSIGNMENT: ROUTER,
    spans.PERMUTE: DISPATCH,
    spans.OUT: ALL_TO_ALL,
    spans.EXPERTS: EXPERTS,
    spans.BACK: ALL_TO_ALL,
    spans.SKEW: ALL_TO_ALL,
}
_OF_RANGE = {
    spans.EMBEDDING: EMBEDDING,
    spans.LOGITS: OUTPUT,
    spans.HEALTH: spans.HEALTH,
    FORWARD: OUTPUT,
    BACKWARD: OTHER,
    spans.UPDATE: OTHER,
    spans.REDUCTION: REDUCTION,
    # fairseq's own ranges between the backward pass and the optimizer
    **dict.fromkeys(("reduce-grads", "multiply-grads", "clip-grads"), REDUCTION),
    spans.OPTIMIZER: spans.OPTIMIZER,
}
#: phases of a component by their names in reports; recomputation belongs to the backward pass
_PHASES = {"forward": FORWARD, "backward": BACKWARD, "neither": None}


class TimeRow(NamedTuple):
    """Seconds of some updates that have the same place, component and phase."""

    #: one of :data:`PARTS`, or (layer, stage) of a sparse layer
    place: str | tuple[str, str]
    #: one of :data:`COMPONENTS`
    component: str
    #: FORWARD, BACKWARD (recomputation included), or None outside both
    phase: str | None
    seconds: float


def rows_of_trace(events: Iterable[dict[str, Any]]) -> tuple[int, list[TimeRow]]:
    """Classify the time of a trace of torch's profiler; return the number of its updates, and rows that sum to them.

    Args:
        events: of any number of updates, each in a range :data:`smlp.parallel.spans.UPDATE`.

    Raises:
        UserError: there is no update.
    """
    timeline = TraceTimeline(events, lambda name: (_place_of_range(name), _component_of_range(name)))
    rows = [
        TimeRow(place or OTHER, component or OTHER, phase, seconds)
        for ((place, component), phase), seconds in timeline.divide().items()
    ]
    return len(timeline.updates), rows


def _place_of_range(name: str) -> str | tuple[str, str] | None:
    if (stage := split_name(name)) is not None:
        return stage
    if name.endswith((DENSE_BLOCK, SPARSE_BLOCK)):
        return _DENSE if name.endswith(DENSE_BLOCK) else _REST_OF_SPARSE
    return _PART_OF_RANGE.get(name)


def _component_of_range(name: str) -> str | None:
    if (stage := split_name(name)) is not None:
        # the experts of an sMoE are spatial projections
        return SPATIAL if stage[1] == spans.EXPERTS and stage[0].endswith("(sMoE)") else _OF_STAGE[stage[1]]
    if name.endswith((DENSE_BLOCK, SPARSE_BLOCK)):
        return REST_OF_BLOCKS
    _, separator, part = name.rpartition(SEPARATOR)
    return part if separator and part in MODULE_PARTS.values() else _OF_RANGE.get(name)


def costs_of_trace(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return milliseconds per update, and shares of an update, of the updates in a trace: by layer and stage, by stage
    of all layers, and by :data:`PARTS`. Stages and parts add up to the whole.

    Arguments and errors are those of :func:`rows_of_trace`.
    """
    num_updates, rows = rows_of_trace(events)
    totals: Counter[str | tuple[str, str]] = Counter()
    for row in rows:
        totals[row.place] += row.seconds
    whole = totals.total()

    def both(seconds: dict[str, float]) -> dict[str, dict[str, float]]:
        return {name: {"ms": 1e3 * value / num_updates, "share": value / whole} for name, value in seconds.items()}

    layers = sorted({place[0] for place in totals if isinstance(place, tuple)}, key=_layer_order)
    return {
        "updates": num_updates,
        "ms": 1e3 * whole / num_updates,
        "layers": {layer: both({stage: totals[layer, stage] for stage in STAGES}) for layer in layers},
        "stages": both({stage: sum(totals[layer, stage] for layer in layers) for stage in STAGES}),
        "parts": both({part: totals[part] for part in PARTS}),
    }


def _layer_order(name: str) -> tuple[int, str]:
    digits = "".join(character for character in name if character.isdigit())
    return int(digits or 0), name


class Breakdown:
    """Adds up updates of one rank.

    Args:
        config: of the model.
        limit: operations a second that the device reaches in a matrix product.
    """

    def __init__(self, config: ModelConfig, limit: float) -> None:
        self.config, self.limit = config, limit
        self.num_updates = self.num_tokens = 0
        self._seconds: Counter[tuple[str, str | None]] = Counter()
        self._flops: Counter[str] = Counter()

    def add(self, events: Iterable[dict[str, Any]], batches: Iterable[tuple[int, int]]) -> None:
        """Add one more update.

        Args:
            events: of its trace.
            batches: tokens, and length of the sequences, of each of its micro-batches.

        Raises:
            UserError: the trace holds no update.
        """
        num_updates, rows = rows_of_trace(events)
        self.num_updates += num_updates
        for row in rows:
            self._seconds[row.component, row.phase] += row.seconds
        for num_tokens, length in batches:
            self.num_tokens += num_tokens
            for kind, flops in training_work(self.config, length).items():
                self._flops[kind] += num_tokens * flops

    def as_json(self) -> dict[str, Any]:
        """Return times in milliseconds per update, operations per update and rates per second, of the whole update and
        of each component that took time or has work to do."""
        rows = [self._row(name, (name,), self._flops[name]) for name in COMPONENTS]
        return {
            "updates": self.num_updates,
            "tokens": self.num_tokens,
            "matmul_flops_per_second": self.limit,
            "components": [row for row in rows if row["ms"] or row["flops"]],
            "update": self._row("update", COMPONENTS, self._flops.total()),
        }

    def _row(self, title: str, components: Iterable[str], flops: float) -> dict[str, Any]:
        parts = {name: sum(self._seconds[one, phase] for one in components) for name, phase in _PHASES.items()}
        seconds = sum(parts.values())
        rate = flops / seconds if seconds else 0.0
        return {
            "component": title,
            **{f"{name}_ms": 1e3 * part / self.num_updates for name, part in parts.items()},
            "ms": 1e3 * seconds / self.num_updates,
            "share": seconds / self._seconds.total(),
            "flops": flops / self.num_updates,
            "flops_per_second": rate,
            "share_of_limit": rate / self.limit,
        }


def as_text(report: dict[str, Any]) -> str:
    """Return :meth:`Breakdown.as_json` as a table."""
    lines = [
        f"{'':<24}{'forward':>9}{'backward':>9}{'all':>9}{'share':>8}{'work':>10}{'speed':>10}{'of limit':>9}",
        f"{'':<24}{'ms':>9}{'ms':>9}{'ms':>9}{'%':>8}{'GFLOP':>10}{'GFLOP/s':>10}{'%':>9}",
    ]
    for row in (*report["components"], report["update"]):
        times = [_number(row[name], 2) for name in ("forward_ms", "backward_ms", "ms")]
        work = [_number(row["flops"] / 1e9, 3), _number(row["flops_per_second"] / 1e9, 1)]
        cells = [f"{cell:>9}" for cell in times] + [f"{100 * row['share']:>8.1f}", *(f"{cell:>10}" for cell in work)]
        lines.append(f"{row['component']:<24}" + "".join(cells) + f"{_number(100 * row['share_of_limit'], 1):>9}")
    return "\n".join(lines)


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if value else "-"
