"""Divide the time of updates among their owners, from a Chrome trace that torch's profiler wrote.

Ranges of :mod:`smlp.parallel.spans` say to whom a piece of the forward pass belongs. In the backward pass, each
operation has the owner of the operation whose gradient it computes: the profiler gives both the same sequence number.
Every moment of an update is counted once, for whatever is innermost at that moment; so the parts add up to the whole.
On a GPU, that is the running kernel (one that computes rather than one that communicates, which it hides); only while
no kernel runs is it what the CPU does.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from smlp.errors import UserError
from smlp.parallel.spans import BACKWARD, FORWARD, UPDATE

_BACKWARD_NODE = "autograd::engine::evaluate_function"
_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
#: precedence if several are busy at the same time
_MAIN_THREAD, _BACKWARD_THREAD, _COMMUNICATION, _COMPUTATION = range(4)

#: the owner of a piece of time in each of the caller's classifications; None where one of them has no owner
Owner = tuple[Hashable, ...]
#: an owner; and FORWARD, BACKWARD, or None outside both
Claim = tuple[Owner, str | None]


@dataclass(slots=True, eq=False)
class Event:
    """One entry of a trace; times in microseconds."""

    name: str
    category: str
    thread: Any
    start: float
    end: float
    sequence: int | None
    external_id: int | None
    parent: Event | None = field(default=None, repr=False)
    #: the pass that it belongs to
    phase: str | None = None

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Event:
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


class TraceTimeline:
    """The events of some updates of one process.

    Args:
        entries: ``traceEvents`` of the trace; each update is in a range :data:`smlp.parallel.spans.UPDATE`.
        owner_of_range: returns the owner of the time in a range of this name; where that is None, the owner of the
            range around it counts.

    Raises:
        UserError: there is no update.
    """

    def __init__(self, entries: Iterable[dict[str, Any]], owner_of_range: Callable[[str], Owner]) -> None:
        events = [Event.of(entry) for entry in entries if entry.get("ph") == "X" and entry.get("dur", 0) >= 0]
        self.owner_of_range = owner_of_range
        self.nobody = (None,) * len(owner_of_range(""))
        self.updates = [event for event in events if event.name == UPDATE and event.category == "user_annotation"]
        if not self.updates:
            raise UserError(f"the profile holds no range {UPDATE!r}: there is no update whose time could be divided")
        self.main = self.updates[0].thread
        on_cpu = sorted(
            (event for event in events if event.category in ("cpu_op", "user_annotation")),
            key=lambda event: (event.start, -event.end),
        )
        by_thread: dict[Any, list[Event]] = {}
        for event in on_cpu:
            by_thread.setdefault(event.thread, []).append(event)
        backward = {event.thread for event in on_cpu if event.name.startswith(_BACKWARD_NODE)}
        self.busy_on_cpu = [event for event in on_cpu if event.thread == self.main or event.thread in backward]
        self.on_device = [event for event in events if event.category in _DEVICE_CATEGORIES]
        self.by_external_id = {event.external_id: event for event in on_cpu if event.external_id is not None}
        #: forward operation by sequence number; the last one to begin with it creates the backward node
        self.forward: dict[int, Event] = {}
        #: the backward operation just before its gradients are accumulated into a parameter's
        self.before: dict[Event, Event] = {}
        self.found: dict[Event, Claim] = {}
        for thread, own in by_thread.items():
            self._nest(own, thread == self.main)

    def divide(self) -> Counter[Claim]:
        """Return the seconds of all updates by owner and pass."""
        totals: Counter[Claim] = Counter()
        for update in self.updates:
            for event, microseconds in self._busy(update.start, update.end).items():
                totals[self._claim(event)] += microseconds * 1e-6
        return totals

    def _nest(self, events: list[Event], is_main: bool) -> None:
        open_events: list[tuple[Event, bool]] = []
        last_node: Event | None = None
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
            if in_backward or event.name == BACKWARD:
                event.phase = BACKWARD
            elif event.name == FORWARD:
                event.phase = FORWARD
            elif event.parent is not None:
                event.phase = event.parent.phase
            open_events.append((event, in_backward))

    def _claim(self, event: Event | None) -> Claim:
        """Return the owner of an event's time, and its pass."""
        if event is None:
            return self.nobody, None
        if event not in self.found:
            if event.category in _DEVICE_CATEGORIES:
                self.found[event] = self._claim(self.by_external_id.get(event.external_id))
            else:
                self.found[event] = self._owner(event), event.phase
        return self.found[event]

    def _owner(self, event: Event) -> Owner:
        own = self.owner_of_range(event.name) if event.category == "user_annotation" else self.nobody
        if None not in own:
            return own
        source = event.parent
        if event.name.startswith(_BACKWARD_NODE):
            source = self.before.get(event) or self.forward.get(event.sequence) or source
        return tuple(mine or outer for mine, outer in zip(own, self._claim(source)[0], strict=True))

    def _busy(self, start: float, end: float) -> Counter[Event]:
        """Return the time between two moments by the event that was busy; every moment counts for one event."""
        events = [(self._rank(event), event) for event in (*self.busy_on_cpu, *self.on_device)]
        events = [(rank, event) for rank, event in events if event.end > start and event.start < end]
        events.sort(key=lambda item: (item[1].start, -item[1].end))
        moments = sorted({start, end, *(t for _, e in events for t in (e.start, e.end) if start < t < end)})
        # in order of precedence: by rank, then the last to begin, then the innermost
        active: list[tuple[int, float, int, Event]] = []
        totals: Counter[Event] = Counter()
        position = 0
        for now, until in pairwise(moments):
            while position < len(events) and events[position][1].start <= now:
                rank, event = events[position]
                heapq.heappush(active, (-rank, -event.start, -position, event))
                position += 1
            while active[0][3].end <= now:
                heapq.heappop(active)
            totals[active[0][3]] += until - now
        return totals

    def _rank(self, event: Event) -> int:
        if event.category in _DEVICE_CATEGORIES:
            return _COMMUNICATION if "nccl" in event.name.lower() else _COMPUTATION
        return _MAIN_THREAD if event.thread == self.main else _BACKWARD_THREAD
