"""Recordings of operations on a GPU, with a stand-in for CUDA graphs; scripts/gpu/check.sh uses true ones."""

import pytest
import torch

from smlp.ops import replay
from smlp.ops.replay import Replayed


class Recorded:
    """Stands for a graph: the function is only called to make it."""

    def __init__(self, function, inputs):
        if inputs[0].dtype == torch.float64:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        self.factor = function(*(torch.ones_like(x) for x in inputs))[0].view(-1)[0]

    def replay(self, inputs):
        return (inputs[0] * self.factor,)


@pytest.fixture
def doubled(monkeypatch):
    """A function that counts its calls, on what claims to be a GPU."""
    calls = []

    def function(x, *rest):
        calls.append(x.shape)
        return (2 * x,)

    monkeypatch.setattr(replay, "_can_record", lambda x: True)
    monkeypatch.setattr(replay, "_Recording", Recorded)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: 0)
    wrapped = Replayed(function)
    wrapped.calls = calls
    return wrapped


def test_shapes_that_come_again_are_recorded(doubled):
    for number in range(5):
        x = torch.full((3,), float(number))
        assert torch.equal(doubled(x, torch.zeros(2))[0], 2 * x)
    assert len(doubled.calls) == 3, "two calls and the recording"
    for x in (torch.ones(4), torch.ones(3).half()):
        assert torch.equal(doubled(x, torch.zeros(2))[0], 2 * x)
    doubled(torch.ones(3), torch.zeros(1))
    assert len(doubled.calls) == 6, "another shape, another dtype, another second shape"


def test_few_recordings_are_kept(doubled):
    for size in range(1, 8):
        for _ in range(3):
            doubled(torch.ones(size))
    assert len(doubled._recordings) == 4
    for size in range(10, 200):  # each comes once
        doubled(torch.ones(size))
    assert len(doubled._recordings) == 4 and len(doubled._calls) <= 64


def test_what_cannot_be_recorded_is_computed_all_the_same(doubled):
    x = torch.ones(3, dtype=torch.float64)
    for _ in range(2):
        doubled(x)
    with pytest.warns(UserWarning, match="could not be recorded: operation not permitted$"):
        assert torch.equal(doubled(x)[0], 2 * x)
    assert torch.equal(doubled(x)[0], 2 * x)


def test_a_cpu_records_nothing():
    plain = Replayed(lambda x: (x + 1,))
    for _ in range(5):
        assert plain(torch.zeros(1))[0].item() == 1
    assert not plain._calls and not plain._recordings
