"""Where the time of an update goes, by stage of the sparse layers and by part of the update."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from smlp.costs.recording import DENSE_BLOCK, SPARSE_BLOCK
from smlp.costs.timeline import Timeline
from smlp.parallel.spans import BACKWARD, FORWARD, OPTIMIZER, REDUCTION, STAGES, UPDATE, split_name

OTHER = "other"
#: what an update consists of beside the stages of its sparse layers
PARTS = (
    "rest of sparse blocks",
    "dense blocks",
    "embedding, head and loss",
    REDUCTION,
    OPTIMIZER,
    OTHER,
)
_PART_OF_RANGE = {FORWARD: PARTS[2], REDUCTION: REDUCTION, OPTIMIZER: OPTIMIZER, BACKWARD: OTHER, UPDATE: OTHER}

#: a stage of a layer, or a part of the update
Owner = tuple[str, str] | str


@dataclass(frozen=True)
class Costs:
    """Seconds of some updates of one process; all of ``layers`` and ``parts`` together are ``seconds``."""

    num_updates: int
    seconds: float
    #: by layer and stage
    layers: dict[str, dict[str, float]]
    #: by :data:`PARTS`
    parts: dict[str, float]

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of each stage in all layers."""
        return {stage: sum(layer[stage] for layer in self.layers.values()) for stage in STAGES}

    def share(self, seconds: float) -> float:
        """Seconds as a share of all updates."""
        return seconds / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Milliseconds of an update, and shares of it."""

        def both(seconds: dict[str, float]) -> dict[str, dict[str, float]]:
            return {
                name: {"ms": 1e3 * value / self.num_updates, "share": self.share(value)}
                for name, value in seconds.items()
            }

        return {
            "updates": self.num_updates,
            "ms": 1e3 * self.seconds / self.num_updates,
            "layers": {name: both(stages) for name, stages in self.layers.items()},
            "stages": both(self.stages),
            "parts": both(self.parts),
        }


def costs_of_trace(events: Iterable[dict[str, Any]]) -> Costs:
    """The costs of the updates in a trace of torch's profiler.

    Args:
        events: of any number of updates, each in a range :data:`smlp.parallel.spans.UPDATE`.

    Raises:
        UserError: there is no update.
    """
    timeline = Timeline(events, _owner_of_range)
    totals: dict[Owner, float] = {}
    for (owner, _), seconds in timeline.divide().items():
        totals[owner or OTHER] = totals.get(owner or OTHER, 0.0) + seconds
    names = sorted({owner[0] for owner in totals if isinstance(owner, tuple)}, key=_layer_order)
    return Costs(
        num_updates=len(timeline.updates),
        seconds=timeline.seconds,
        layers={name: {stage: totals.get((name, stage), 0.0) for stage in STAGES} for name in names},
        parts={part: totals.get(part, 0.0) for part in PARTS},
    )


def _owner_of_range(name: str) -> Owner | None:
    if (stage := split_name(name)) is not None:
        return stage
    if name.endswith((DENSE_BLOCK, SPARSE_BLOCK)):
        return PARTS[name.endswith(DENSE_BLOCK)]
    return _PART_OF_RANGE.get(name)


def _layer_order(name: str) -> tuple[int, str]:
    digits = "".join(character for character in name if character.isdigit())
    return int(digits or 0), name
