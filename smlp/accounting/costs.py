"""Where the time of an update goes, from what a torch profiler recorded.

Ranges of :mod:`smlp.parallel.spans` say to which stage of which layer a piece of the forward pass belongs. In the
backward pass, each operation belongs where the one belongs whose gradient it computes: the profiler gives both the same
sequence number. Every moment of an update is counted once, for whatever is innermost at that moment; so the parts add
up to the whole. Where there is a GPU, that is the kernel that is running (one that computes before one that
communicates, which is hidden behind it), and only while none is running what the CPU does.
"""

from __future__ import annotations

import heapq
import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from smlp.errors import UserError
from smlp.parallel.spans import REDUCTION, STAGES, split_name

#: ranges that whoever runs updates opens around them and around their parts, beside :data:`REDUCTION`
UPDATE, FORWARD, BACKWARD, OPTIMIZER = "update", "forward", "backward", "optimizer"
#: endings of the names of ranges around whole blocks
DENSE_BLOCK, SPARSE_BLOCK = ", dense block", ", sparse block"

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

_BACKWARD_NODE = "autograd::engine::evaluate_function"
_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
#: who is believed where several are busy at a moment
_MAIN_THREAD, _BACKWARD_THREAD, _COMMUNICATION, _COMPUTATION = range(4)

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


def costs_of(profile: torch.profiler.profile, trace: Path | None = None) -> Costs:
    """The costs of the updates in a profile that is over.

    Args:
        profile: of any number of updates, each in a range :data:`UPDATE`.
        trace: keeps the Chrome trace there.

    Raises:
        UserError: it holds no update.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return costs_of_trace(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def costs_of_trace(events: Iterable[dict[str, Any]]) -> Costs:
    """The same from the events of a Chrome trace that torch wrote.

    Raises:
        UserError: it holds no update.
    """
    timeline = _Timeline([_Event.of(event) for event in events if event.get("ph") == "X" and event.get("dur", 0) >= 0])
    totals: dict[Owner, float] = {}
    for update in timeline.updates:
        for event, microseconds in timeline.busy(update.start, update.end):
            owner = timeline.owner(event)
            totals[owner] = totals.get(owner, 0.0) + microseconds * 1e-6
    names = sorted({owner[0] for owner in totals if isinstance(owner, tuple)}, key=_layer_order)
    return Costs(
        num_updates=len(timeline.updates),
        seconds=sum(update.end - update.start for update in timeline.updates) * 1e-6,
        layers={name: {stage: totals.get((name, stage), 0.0) for stage in STAGES} for name in names},
        parts={part: totals.get(part, 0.0) for part in PARTS},
    )


def _layer_order(name: str) -> tuple[int, str]:
    digits = "".join(character for character in name if character.isdigit())
    return int(digits or 0), name


@dataclass(slots=True, eq=False)
class _Event:
    """One entry of a trace; times in microseconds."""

    name: str
    category: str
    thread: Any
    start: float
    end: float
    sequence: int | None
    external_id: int | None
    parent: _Event | None = field(default=None, repr=False)

    @classmethod
    def of(cls, entry: dict[str, Any]) -> _Event:
        args = entry.get("args", {})
        start = float(entry["ts"])
        return cls(
            entry["name"],
            entry.get("cat", ""),
            (entry.get("pid"), entry.get("tid")),
            start,
            start + float(entry["dur"]),
            args.get("Sequence number"),
            args.get("External id"),
        )


class _Timeline:
    """Events with their nesting, and whom they belong to."""

    def __init__(self, events: list[_Event]) -> None:
        self.updates = [event for event in events if event.name == UPDATE and event.category == "user_annotation"]
        if not self.updates:
            raise UserError(f"the profile holds no range {UPDATE!r}: there is no update whose time could be divided")
        self.main = self.updates[0].thread
        on_cpu = sorted(
            (event for event in events if event.category in ("cpu_op", "user_annotation")),
            key=lambda event: (event.start, -event.end),
        )
        by_thread: dict[Any, list[_Event]] = {}
        for event in on_cpu:
            by_thread.setdefault(event.thread, []).append(event)
        backward = {event.thread for event in on_cpu if event.name.startswith(_BACKWARD_NODE)}
        self.busy_on_cpu = [event for event in on_cpu if event.thread == self.main or event.thread in backward]
        self.on_device = [event for event in events if event.category in _DEVICE_CATEGORIES]
        self.by_external_id = {event.external_id: event for event in on_cpu if event.external_id is not None}
        #: the forward operation of a sequence number: the last one to begin with it makes the backward node
        self.forward: dict[int, _Event] = {}
        #: what the backward pass did just before its gradients are added to a parameter's
        self.before: dict[_Event, _Event] = {}
        self.owners: dict[_Event, Owner] = {}
        for thread, own in by_thread.items():
            self._nest(own, thread == self.main)

    def _nest(self, events: list[_Event], is_main: bool) -> None:
        open_events: list[tuple[_Event, bool]] = []
        last_node: _Event | None = None
        for event in events:
            while open_events and open_events[-1][0].end <= event.start:
                open_events.pop()
            event.parent, in_backward = open_events[-1] if open_events else (None, False)
            is_node = event.name.startswith(_BACKWARD_NODE)
            if is_node and event.sequence is None and last_node is not None:
                self.before[event] = last_node
            if is_node and event.sequence is not None:
                last_node = event
            in_backward = in_backward or is_node
            if is_main and not in_backward and event.sequence is not None:
                self.forward[event.sequence] = event
            open_events.append((event, in_backward))

    def owner(self, event: _Event | None) -> Owner:
        """To whom the time of an event belongs."""
        if event is None:
            return OTHER
        if event not in self.owners:
            self.owners[event] = self._find_owner(event)
        return self.owners[event]

    def _find_owner(self, event: _Event) -> Owner:
        if event.category in _DEVICE_CATEGORIES:
            return self.owner(self.by_external_id.get(event.external_id))
        if event.category == "user_annotation":
            if (stage := split_name(event.name)) is not None:
                return stage
            if event.name.endswith((DENSE_BLOCK, SPARSE_BLOCK)):
                return PARTS[event.name.endswith(DENSE_BLOCK)]
            if event.name in _PART_OF_RANGE:
                return _PART_OF_RANGE[event.name]
        if event.name.startswith(_BACKWARD_NODE):
            if event in self.before:
                return self.owner(self.before[event])
            if event.sequence in self.forward:
                return self.owner(self.forward[event.sequence])
        return self.owner(event.parent)

    def busy(self, start: float, end: float) -> list[tuple[_Event, float]]:
        """Who was busy between two times, and how long: every moment is given to one event."""
        events = [(self._rank(event), event) for event in (*self.busy_on_cpu, *self.on_device)]
        events = [(rank, event) for rank, event in events if event.end > start and event.start < end]
        events.sort(key=lambda item: (item[1].start, -item[1].end))
        moments = sorted({start, end, *(t for _, e in events for t in (e.start, e.end) if start < t < end)})
        # the busiest first: by rank, then the last to begin, then the innermost
        active: list[tuple[int, float, int, _Event]] = []
        totals: dict[_Event, float] = {}
        position = 0
        for now, until in pairwise(moments):
            while position < len(events) and events[position][1].start <= now:
                rank, event = events[position]
                heapq.heappush(active, (-rank, -event.start, -position, event))
                position += 1
            while active[0][3].end <= now:
                heapq.heappop(active)
            totals[active[0][3]] = totals.get(active[0][3], 0.0) + until - now
        return list(totals.items())

    def _rank(self, event: _Event) -> int:
        if event.category in _DEVICE_CATEGORIES:
            return _COMMUNICATION if "nccl" in event.name.lower() else _COMPUTATION
        return _MAIN_THREAD if event.thread == self.main else _BACKWARD_THREAD
