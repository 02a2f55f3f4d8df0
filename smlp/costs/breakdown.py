"""What each component of a model costs in training: time, operations, and how close that is to what the device can do.

The rows are the kinds of work of :mod:`smlp.costs.component` and what takes time without any of it; together they
are the whole update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from smlp.config import ModelConfig
from smlp.costs.component import EXPERTS, NORMS, OUTPUT, PROJECTIONS, ROUTER, SCORES, SPATIAL
from smlp.costs.formula import training_work
from smlp.costs.recording import DENSE_BLOCK, MODULE_PARTS, SPARSE_BLOCK
from smlp.costs.timeline import Timeline
from smlp.parallel import spans
from smlp.parallel.spans import BACKWARD, FORWARD, SEPARATOR, split_name

EMBEDDING = "embedding"
DISPATCH = "dispatch and combine"
ALL_TO_ALL = "all-to-all"
REST_OF_BLOCKS = "rest of blocks"
REDUCTION = "gradients: reduce, clip"
OTHER = "other"
#: in the order of the table
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


#: where a component spends time: fields of :class:`Row`
_PARTS_OF_TIME = ("forward", "backward", "neither")


@dataclass(frozen=True)
class Row:
    """One component in all profiled updates of one rank."""

    component: str
    #: seconds in the forward pass, in the backward pass (what is computed again included), and in neither
    forward: float
    backward: float
    neither: float
    #: operations, as :mod:`smlp.costs.formula` counts them
    flops: float

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.forward + self.backward + self.neither


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
        """One more update.

        Args:
            events: of its trace.
            batches: tokens, and length of the sequences, of each of its micro-batches.

        Raises:
            UserError: the trace holds no update.
        """
        timeline = Timeline(events, component_of_range)
        self.num_updates += len(timeline.updates)
        for (component, phase), seconds in timeline.divide().items():
            self._seconds[component or OTHER, phase] += seconds
        for num_tokens, length in batches:
            self.num_tokens += num_tokens
            for kind, flops in training_work(self.config, length).items():
                self._flops[kind] += num_tokens * flops

    def rows(self) -> list[Row]:
        """Of all components that took time or have work to do."""
        rows = [
            Row(name, *(self._seconds[name, phase] for phase in (FORWARD, BACKWARD, None)), self._flops[name])
            for name in COMPONENTS
        ]
        return [row for row in rows if row.seconds or row.flops]

    @property
    def seconds(self) -> float:
        """Of all updates."""
        return self._seconds.total()

    def as_json(self) -> dict[str, Any]:
        """Times in milliseconds of an update, operations of an update, rates a second."""
        rows = self.rows()
        total = Row(
            "update", *(sum(getattr(row, name) for row in rows) for name in _PARTS_OF_TIME), self._flops.total()
        )
        return {
            "updates": self.num_updates,
            "tokens": self.num_tokens,
            "matmul_flops_per_second": self.limit,
            "components": [self._row_as_json(row) for row in rows],
            "update": self._row_as_json(total),
        }

    def _row_as_json(self, row: Row) -> dict[str, Any]:
        rate = row.flops / row.seconds if row.seconds else 0.0
        return {
            "component": row.component,
            **{f"{name}_ms": 1e3 * getattr(row, name) / self.num_updates for name in _PARTS_OF_TIME},
            "ms": 1e3 * row.seconds / self.num_updates,
            "share": row.seconds / self.seconds,
            "flops": row.flops / self.num_updates,
            "flops_per_second": rate,
            "share_of_limit": rate / self.limit,
        }


def component_of_range(name: str) -> str | None:
    """To which component the time in a range of this name belongs; None if the name says nothing about it."""
    if (stage := split_name(name)) is not None:
        # the experts of an sMoE are spatial projections
        return SPATIAL if stage[1] == spans.EXPERTS and stage[0].endswith("(sMoE)") else _OF_STAGE[stage[1]]
    if name.endswith((DENSE_BLOCK, SPARSE_BLOCK)):
        return REST_OF_BLOCKS
    _, separator, part = name.rpartition(SEPARATOR)
    return part if separator and part in MODULE_PARTS.values() else _OF_RANGE.get(name)


def as_text(report: dict[str, Any]) -> str:
    """The table of :meth:`Breakdown.as_json`."""
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
