"""Ending a text before certain strings, also where they come in several pieces."""

from __future__ import annotations

from collections.abc import Sequence

from smlp.errors import UserError


class StopStrings:
    """Lets text through piece by piece, up to that one of some strings which is the first to be complete.

    What may be the beginning of one is held back until more is known.

    Raises:
        UserError: one of the strings is empty, or none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        for stop in stops:
            if not isinstance(stop, str):
                raise UserError(f"a stop string must be a string, got {stop!r:.80}")
        if not all(stops):
            raise UserError("a stop string must not be empty: every text would end at once")
        self._stops = tuple(stops)
        self._held = ""
        #: whether one of the strings has come
        self.found = False

    def push(self, piece: str) -> str:
        """Takes the next piece of text; returns what is certain to come before every stop string."""
        held = self._held + piece
        # what is complete first counts, so that it makes no difference how the text is cut
        complete = [(place + len(stop), place) for stop in self._stops if (place := held.find(stop)) >= 0]
        if complete:
            self.found, self._held = True, ""
            return held[: min(complete)[1]]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def rest(self) -> str:
        """What is still held back, for a text that ends here."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
