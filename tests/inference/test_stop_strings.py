"""Text that comes in pieces ends before a stop string."""

import itertools
import random

import pytest

import smlp
from smlp.inference.generation.continuations import StopStrings


def through(stops, pieces):
    """What is let through, at once and in the end, and whether a stop was found."""
    gate, out = StopStrings(stops), []
    for piece in pieces:
        out.append(gate.push(piece))
        if gate.found:
            return out, True
    out[-1] += gate.rest()
    return out, False


def test_what_may_be_a_beginning_is_held_back():
    assert through(["END"], ["an E", "N", "emy E", "ND."]) == (["an ", "", "ENemy ", ""], True)
    assert through(["END"], ["an E", "N"]) == (["an ", "EN"], False)
    assert through(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], True)
    assert through([], ["a", "b"]) == (["a", "b"], False)
    assert through(["xyz", "y"], ["wx", "y", "z"]) == (["w", "x"], True)
    assert through(["xyz", "y"], ["wxyz"]) == (["wx"], True)
    assert through(["yz", "xyz"], ["wxy", "z"]) == (["w", ""], True)


def test_however_it_is_cut_it_ends_at_the_first_stop():
    draw = random.Random(0)
    found = 0
    for _ in range(500):
        text = "".join(draw.choice("ab.") for _ in range(draw.randint(1, 12)))
        stops = ["".join(draw.choice("ab.") for _ in range(draw.randint(1, 4))) for _ in range(draw.randint(1, 3))]
        ends = sorted(draw.sample(range(len(text) + 1), min(3, len(text))))
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]
        complete = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        out, stopped = through(stops, pieces)
        assert stopped == bool(complete)
        assert "".join(out) == (text[: min(complete)[1]] if complete else text)
        found += stopped and len(out) > 1
    assert found > 100


def test_an_empty_stop_is_refused():
    with pytest.raises(smlp.UserError, match="must not be empty"):
        StopStrings(["a", ""])
