"""What each component of a model costs: time from traces, work by formula, the limit that speeds are compared with."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from architectures import LANGUAGE_MODELS
from test_costs import BACKWARD, FORWARD, SMALL, _entry, _range

from smlp.config.presets import preset
from smlp.costs.breakdown import COMPONENTS, Breakdown
from smlp.costs.formula import components, flops_per_token, training_flops, training_work
from smlp.costs.matmul_rate import matmul_rate
from smlp.costs.profiled import _Trainer
from smlp.costs.recording import TraceFile, recording, trace_of
from smlp.fairseq_compat.profiling import UpdateProfiler
from smlp.parallel import one_process, spans

pytestmark = pytest.mark.timeout(120)


def check_sums(report: dict) -> None:
    rows, update = report["components"], report["update"]
    assert [row["component"] for row in rows] == [name for name in COMPONENTS if name in {r["component"] for r in rows}]
    for key in ("forward_ms", "backward_ms", "neither_ms", "ms", "share", "flops"):
        assert sum(row[key] for row in rows) == pytest.approx(update[key], rel=1e-9), key
    assert update["share"] == pytest.approx(1)
    for row in (*rows, update):
        assert row["forward_ms"] + row["backward_ms"] + row["neither_ms"] == pytest.approx(row["ms"])
        assert row["flops_per_second"] == pytest.approx(1e3 * row["flops"] / row["ms"])
        assert row["share_of_limit"] == pytest.approx(row["flops_per_second"] / report["matmul_flops_per_second"])


@pytest.mark.parametrize("backward_thread", [1, 3])
def test_components_by_hand(backward_thread):
    """One update, with fairseq's names of the parts after the backward pass, which runs in a thread of its own where
    there is a GPU."""
    own = [
        _range("layer 0, dense block / norms", 50, 60),
        _range("layer 0, dense block / dense projections", 60, 140),
        _range("embedding", 15, 45),
        _range("router health", 391, 395),
        _range("backward", 400, 700),
        _range("reduce-grads", 700, 750),
        _range("clip-grads", 760, 800),
        _range("optimizer", 800, 950),
    ]
    again = [
        _entry("autograd::engine::evaluate_function: CheckpointBackward", 690, 698, seq=99),
        _range("layer 0, dense block / spatial", 691, 695),
    ]
    in_thread = [{**entry, "tid": backward_thread} for entry in (*BACKWARD, *again)]
    breakdown = Breakdown(preset("smlp_tiny", **SMALL), limit=1e9)
    breakdown.add([*FORWARD, *in_thread, *own], [(20, 10), (5, 5)])
    report = breakdown.as_json()
    rows = {row["component"]: row for row in report["components"]}
    phases = ("forward_ms", "backward_ms", "neither_ms")
    micros = {name: tuple(round(1e3 * row[phase]) for phase in phases) for name, row in rows.items()}
    assert micros == {
        "embedding": (30, 40, 0),
        "norms": (10, 0, 0),
        "dense projections": (80, 80, 0),
        "spatial": (0, 4, 0),
        "router": (100, 10, 0),
        "experts": (80, 120, 0),
        "rest of blocks": (10 + 60, 0, 0),
        "output layer and loss": (390 - 30 - 100 - 240 - 4, 0, 0),
        "router health": (4, 0, 0),
        "gradients: reduce, clip": (0, 0, 90),
        "optimizer": (0, 0, 150),
        "other": (0, 300 - 40 - 4 - 80 - 10 - 120, 10 + 10 + 50),
    }
    assert report["update"]["ms"] == pytest.approx(1)
    want = 20 * training_flops(breakdown.config, 10) + 5 * training_flops(breakdown.config, 5)
    assert sum(row["flops"] for row in rows.values()) == pytest.approx(want)
    check_sums(report)


@pytest.mark.parametrize("arch", ["smlp_tiny", "smlp_partial_tiny", "gmlp_moe_tiny", "gshard_lm_tiny", "base_lm_tiny"])
def test_work_is_done_where_the_formula_has_it(arch):
    """Each kind of work takes time in both passes, and no work is without time."""
    config = preset(arch, **SMALL, dropout=0.1)
    trainer, tokens = _Trainer(config, one_process(4), torch.device("cpu")), torch.randint(2, 40, (2, 10))
    trainer.update(tokens)
    with recording(trainer.model, torch.device("cpu")) as recorded:
        trainer.update(tokens)
    breakdown = Breakdown(config, limit=1e9)
    breakdown.add(trace_of(recorded)["traceEvents"], [(20, 10)])
    work = training_work(config, 10)
    report = breakdown.as_json()
    for row in report["components"]:
        assert row["flops"] == 20 * work.get(row["component"], 0.0)
        if row["flops"]:
            assert row["forward_ms"] > 0 and row["backward_ms"] > 0, row
    assert {kind for kind, flops in work.items() if flops} <= {row["component"] for row in report["components"]}
    check_sums(report)


def test_nothing_divides_a_whole_range():
    inner = ("layer 1 (tMoE)", "gate")
    with (
        torch.profiler.profile() as profile,
        spans.whole_span("watching"),
        spans.span("within"),
        spans.stage_of(*inner),
    ):
        assert spans.current_span() == "watching"
    names = {event.name for event in profile.events()}
    assert "watching" in names and not names & {"within", "layer 1 (tMoE) / gate"}
    with torch.profiler.profile() as profile, spans.span("after"):
        pass
    assert "after" in {event.name for event in profile.events()}


@pytest.mark.parametrize("arch", LANGUAGE_MODELS)
def test_kinds_of_work_are_all_of_it(arch):
    config = preset(arch)
    for n in (config.max_tokens, 7, config.max_tokens // 2 + 1):
        dense = Counter()
        for part in components(config, n):
            dense.update(part.nominal_work(n))
        assert dense.total() == pytest.approx(flops_per_token(config, n), rel=1e-12)
        causal = {kind: operations / 6 for kind, operations in training_work(config, n).items()}
        mixing = {"spatial", "attention"} | ({"experts"} if config.sparse_block == "gmlp_moe" else set())
        for kind, flops in dense.items():
            assert 0.5 * flops < causal[kind] <= flops if kind in mixing else causal[kind] == pytest.approx(flops), kind


@pytest.mark.parametrize(
    ("arch", "pairs"),
    [
        # for each pair: a head's or expert's share of the features, over all of them F/2, H; scores and values are 2 H
        ("gmlp_lm_tiny", lambda c, n: c.num_dense_layers * c.ffn_dim // 2 * n * (n + 1) // 2),
        ("dense_lm_tiny", lambda c, n: c.num_dense_layers * 2 * c.embed_dim * n * (n + 1) // 2),
        (
            "smlp_partial_tiny",
            lambda c, n: (
                c.num_dense_layers * c.ffn_dim // 2 * n * (n + 1) // 2
                + c.num_sparse_layers * c.embed_dim * (n - c.prefix_tokens) * (n - c.prefix_tokens + 1) // 2
            ),
        ),
    ],
)
def test_the_causal_half_by_counting_pairs(arch, pairs):
    config = preset(arch)
    for n in (config.prefix_tokens + 1, config.prefix_tokens + 30, config.max_tokens):
        work = training_work(config, n)
        assert n * (work.get("spatial", 0) + work.get("attention", 0)) == pytest.approx(6 * pairs(config, n))


def test_the_rate_of_matrix_products():
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other where tests run side by side
    try:
        rates = [matmul_rate(torch.device("cpu"), torch.float32, seconds=0.05) for _ in range(2)]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.random.get_rng_state(), state), "draws nothing that training would draw"
    assert 0.2 < rates[0] / rates[1] < 5 and 1e8 < rates[0] < 1e14


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path):
    trace = TraceFile(tmp_path / "t.json.gz")
    trace.add({"schemaVersion": 1, "traceEvents": [{"ph": "s", "id": 3}]})
    trace.discard()
    assert not list(tmp_path.iterdir())
    trace.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [lambda path: Path(path).write_text('{"traceEvents": ['), lambda path: None])
def test_a_trace_that_is_cut_short_names_its_own_disk(tmp_path, write):
    recorded = SimpleNamespace(export_chrome_trace=write)
    profiler = SimpleNamespace(folder=tmp_path / "run", rank=0)
    with pytest.raises(OSError, match="the trace was cut short") as caught:
        UpdateProfiler._add(profiler, recorded, [])
    assert tmp_path / "run" in Path(caught.value.filename).parents and list((tmp_path / "run").iterdir()) == []
