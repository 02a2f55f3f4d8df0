"""scripts/benchmark.py: that it measures what it says. How fast things are is for the benchmark itself to tell."""

import json
import sys

import pytest
import torch
import torch.distributed as dist
from comparing import assert_balanced
from running import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import benchmark
from benchmarks import peers, spatial, timing
from benchmarks.report import Row, as_markdown, as_text, compared
from benchmarks.settings import Settings

from smlp.errors import UserError


def test_alternatives_take_turns_after_a_first_call(monkeypatch):
    clock, calls = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def variant(name, durations):
        remaining = iter(durations)

        def run():
            calls.append(name)
            clock[0] += next(remaining)

        return run

    seconds = timing.interleaved({"a": variant("a", [9, 1, 2, 7]), "b": variant("b", [9, 5, 4, 4])}, 3, "cpu")
    assert seconds == {"a": 2, "b": 4} and calls == ["a", "b"] * 4


def test_peak_memory_counts_what_lives_at_one_time():
    given = torch.ones(1000)

    def work():
        first = given + 1  # 4000 bytes
        second = first * 2  # 8000
        del first
        third = second.view(10, 100)  # no memory of its own
        return third + 1  # 8000

    assert timing.peak_extra_bytes(work, "cpu") == 8000
    weight = torch.ones(1000, requires_grad=True)

    def learning():
        (weight.exp() * 2).sum().backward()

    assert timing.peak_extra_bytes(learning, "cpu") >= 8000


@pytest.mark.parametrize(("option", "value"), [("--threads", "-1"), ("--json", "/no/such/file")])
def test_bad_options_are_named_before_the_work(option, value):
    with pytest.raises(UserError, match=option):
        benchmark.parse([option, value])


def test_rows_know_whether_they_hold():
    rows = [compared("s", "fast", 0.001, "peer", 0.004, 3.0), compared("s", "slow", 0.002, "peer", 0.004, 3.0)]
    rows.append(Row("t", "memory", 1.0, "peer", 2.0, "MiB", 2.0))
    assert [row.holds for row in rows] == [True, False, None] and rows[0].ratio == 4.0
    assert "holds" in as_text(rows[0]) and "MISSED" in as_text(rows[1])
    page = as_markdown({"date": "today", "device": "this"}, rows, {"tutel": "not installed"})
    assert "| slow | peer | 2.00 ms | 4.00 ms | 2.00 | >= 3 MISSED |" in page and "tutel (not installed)" in page
    assert page.index("## s") < page.index("## t")


def test_the_auction_of_base():
    scores = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    expert_N = torch.empty(96, dtype=torch.long)
    expert_N[peers.auction(scores)] = torch.arange(8).repeat_interleave(12)
    assert_balanced(expert_N, 96, 8)
    got = scores.gather(1, expert_N.unsqueeze(1)).sum()
    assert got > 0.95 * scores.amax(dim=1).sum()


def test_a_peer_that_is_missing_is_noted(monkeypatch):
    monkeypatch.setattr(peers, "absent", {})
    assert peers.module("no_such_peer", "no-such-peer") is None
    assert "no_such_peer" in peers.absent["no-such-peer"]


@pytest.mark.slow
@pytest.mark.parametrize("section", benchmark.SECTIONS)
def test_every_part_runs(section, monkeypatch):
    monkeypatch.setattr(peers, "absent", {})
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which a process group replaces
    try:
        rows = list(benchmark.SECTIONS[section].rows(Settings(scale=16)))
    finally:
        if dist.is_initialized():  # for fairscale's layer
            dist.destroy_process_group()
    assert rows and all(row.ours > 0 and row.theirs > 0 for row in rows)
    assert any(row.target for row in rows)


def test_projection_with_a_gate():
    (row,) = spatial.projection(Settings(scale=32), "gated", 1, 8, 2, 3, gated=True)
    assert row.what == "gated" and row.ratio > 0


def test_projection_also_beside_the_same_library(monkeypatch):
    """Where ours takes another library than torch does."""

    def once(steps, repeats, device):
        return {name: step() or 1.0 for name, step in steps.items()}

    monkeypatch.setattr(spatial, "takes_onednn", lambda *given: True)
    monkeypatch.setattr(spatial, "interleaved", once)
    rows = list(spatial.projection(Settings(), "small", 2, 8, 2, 3))
    assert [(row.other, row.target) for row in rows] == [("masked dense product", 1.6), ("the same by oneDNN", None)]


def test_one_report_does_not_overwrite_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--json and --markdown both name b: one would overwrite the other"):
        benchmark.parse(["--json", "b", "--markdown", str(tmp_path / "b")])


def test_the_command_writes_its_reports(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "Settings", lambda device, quick: Settings(device, quick, scale=32))
    monkeypatch.setattr(benchmark, "matmul_rate", lambda *args: 1e9)
    monkeypatch.setattr(benchmark.timing, "copy_rate", lambda *args: 2e9)
    files = ["--json", str(tmp_path / "b.json"), "--markdown", str(tmp_path / "b.md")]
    assert benchmark.main(benchmark.parse(["--quick", "--only", "assignment", *files])) == 0
    report = json.loads((tmp_path / "b.json").read_text())
    assert report["about"]["GFLOP/s of a matrix product"] == 1 and len(report["rows"]) == 8
    assert "## Balanced assignment" in (tmp_path / "b.md").read_text()
    assert "8 rows in" in capsys.readouterr().out
