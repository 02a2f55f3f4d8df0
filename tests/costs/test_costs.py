"""Where the time of an update goes: stages of sparse layers and the rest."""

from __future__ import annotations

import json
import os
import re
import time

import pytest
import torch
from rank_running import run_ranks
from running import run_python

from smlp.cli import main
from smlp.config.presets import preset
from smlp.costs.breakdown import PARTS, costs_of_trace
from smlp.costs.profiled import _Trainer, measure
from smlp.costs.recording import named_parts
from smlp.errors import UserError
from smlp.launch.local import free_port
from smlp.nn.decoder import Decoder
from smlp.parallel import one_process, spans
from smlp.parallel.spans import STAGES, span, split_name, stage, stage_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

SMALL = {"vocab_size": 40, "max_tokens": 10, "embed_dim": 16, "ffn_dim": 16, "num_heads": 2, "num_experts": 4}
SMALL |= {"num_dense_layers": 2, "num_sparse_layers": 2}
CPU = torch.device("cpu")


def _entry(name: str, start: float, end: float, category: str = "cpu_op", thread: int = 1, **args: int) -> dict:
    """An entry of a Chrome trace; ``seq`` is a sequence number, ``ext`` an external id."""
    names = {"seq": "Sequence number", "ext": "External id"}
    args = {names[key]: value for key, value in args.items()}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "pid": 1, "tid": thread} | {
        "args": args
    }


def _range(name: str, start: float, end: float) -> dict:
    return _entry(name, start, end, "user_annotation")


NODE = "autograd::engine::evaluate_function: "
FORWARD = [
    _range("update", 0, 1000),
    _range("forward", 10, 400),
    _entry("aten::embedding", 20, 40, seq=0),
    _range("layer 0, dense block", 50, 150),
    _entry("aten::linear", 60, 140, seq=1),
    _entry("aten::t", 70, 80, seq=1),  # makes the node 1, not the linear that it is part of
    _entry("aten::addmm", 90, 130, seq=2, ext=7),
    _range("layer 1, sparse block", 150, 390),
    _entry("aten::layer_norm", 160, 190, seq=3),
    _range("layer 1 (tMoE) / gate", 200, 300),
    _entry("aten::mm", 210, 220, seq=4),
    _range("layer 1 (tMoE) / assignment", 230, 290),
    _entry("aten::argmax", 240, 250, seq=5),  # makes no node: 5 is the next operation's
    _range("layer 1 (tMoE) / experts", 300, 380),
    _entry("aten::bmm", 310, 370, seq=5, ext=8),
]
BACKWARD = [
    _entry(NODE + "BmmBackward0", 410, 520, seq=5, ext=9),
    _entry("BmmBackward0", 411, 519, seq=5),
    _entry("aten::bmm", 420, 430),
    _entry(NODE + "torch::autograd::AccumulateGrad", 520, 530),
    _entry(NODE + "MmBackward0", 540, 550, seq=4),
    _entry(NODE + "AddmmBackward0", 560, 640, seq=2),
    _entry(NODE + "EmbeddingBackward0", 650, 690, seq=0),
]


def assert_complete(costs: dict) -> None:
    """Stages and parts are the whole update."""
    for key, whole in (("ms", costs["ms"]), ("share", 1)):
        found = sum(cost[key] for by in ("stages", "parts") for cost in costs[by].values())
        assert found == pytest.approx(whole, rel=1e-9)


def test_every_microsecond_is_counted_once():
    """By hand: one update on one thread."""
    rest = [_range("backward", 400, 700), _range("gradient reduction", 700, 800), _range("optimizer", 800, 950)]
    # of another thread, and before and after the update: not counted
    others = [_entry("gloo:all_to_all", 0, 900, thread=2), _entry("aten::mm", -50, -10), _entry("aten::mm", 1000, 1100)]
    costs = costs_of_trace([*others, *FORWARD, *BACKWARD, *rest, {"ph": "i", "name": "mark"}])
    assert costs["updates"] == 1 and costs["ms"] == pytest.approx(1)
    micros = {name: round(1e3 * cost["ms"]) for name, cost in costs["layers"]["layer 1 (tMoE)"].items()}
    stages = {"gate": 40 + 10, "assignment": 60, "experts": 80 + 110 + 10}
    assert micros == {stage: stages.get(stage, 0) for stage in STAGES}
    assert {name: round(1e3 * cost["ms"]) for name, cost in costs["parts"].items()} == {
        "rest of sparse blocks": 240 - 180,
        "dense blocks": 100 + 80,
        "embedding, head and loss": (390 - 100 - 240) + 40,
        "gradient reduction": 100,
        "optimizer": 150,
        "other": 10 + 50 + (300 - 120 - 10 - 80 - 40),
    }
    assert_complete(costs)
    assert costs["stages"]["experts"] == {"ms": pytest.approx(0.2), "share": pytest.approx(0.2)}


def test_on_a_gpu_kernels_decide_and_the_cpu_only_where_none_runs():
    """By hand: the backward pass in a thread of its own, kernels later than what launched them, one that communicates
    behind one that computes."""
    backward = [{**entry, "tid": 3} for entry in BACKWARD]
    kernels = [
        _entry("gemm", 100, 250, "kernel", thread=7, ext=7),  # of the dense block, while the CPU is at the gate
        _entry("ncclDevKernel_SendRecv", 240, 360, "kernel", thread=8, ext=10),
        _entry("bmm", 320, 420, "kernel", thread=7, ext=8),
        _entry("bmm backward", 900, 960, "kernel", thread=7, ext=9),
        _entry("Memset", 960, 980, "gpu_memset", thread=7),  # nobody knows whose
    ]
    send = [_range("layer 1 (tMoE) / all-to-all out, backward", 230, 231), _entry("nccl:send", 230, 231, ext=10)]
    events = [*FORWARD, *send, *backward, *kernels, _range("backward", 400, 700), _range("optimizer", 800, 950)]
    costs = costs_of_trace(events)
    stages = costs["layers"]["layer 1 (tMoE)"]
    micros = {name: round(1e3 * cost["ms"]) for name, cost in stages.items() if cost["ms"]}
    # the CPU's share of the experts' backward pass begins where the kernel ends
    assert micros == {"all-to-all out": 320 - 250, "experts": 100 + (520 - 420) + 10 + 60, "gate": 10}
    assert round(1e3 * costs["parts"]["dense blocks"]["ms"]) == 50 + 150 + 80
    assert round(1e3 * costs["parts"]["optimizer"]["ms"]) == 100
    assert costs["ms"] == pytest.approx(1)
    assert_complete(costs)


def test_a_trace_without_updates_is_refused():
    with pytest.raises(UserError, match="no range 'update'"):
        costs_of_trace(FORWARD[1:])


@pytest.mark.parametrize(
    ("arch", "kinds"),
    [
        ("smlp_tiny", {"sMoE": "permute experts", "tMoE": "gate assignment permute experts"}),
        ("smlp_partial_tiny", {"sMoE": "gate assignment permute experts", "tMoE": "gate assignment permute experts"}),
        ("gmlp_moe_tiny", {"gMLP-MoE": "gate assignment permute experts"}),
        ("gshard_lm_tiny", {"tMoE": "gate assignment permute experts"}),
        ("hash_lm_tiny", {"tMoE": "gate assignment permute experts"}),
    ],
)
def test_stages_of_a_model_in_one_process(arch, kinds, tmp_path):
    config = preset(arch, **SMALL)
    measured = measure(config, one_process(4), 2, 2, CPU, tmp_path / "trace.json")
    costs = measured.costs
    assert costs["updates"] == len(measured.seconds) == 2
    assert_complete(costs)
    layers = config.sparse_layer_indices()
    assert list(costs["layers"]) == [f"layer {index} ({kind})" for index in layers for kind in kinds]
    for name, stages in costs["layers"].items():
        used = {stage for stage, cost in stages.items() if cost["ms"]}
        assert used == set(kinds[name.partition("(")[2][:-1]].split()), name
    assert all(costs["parts"][part]["ms"] > 0 for part in PARTS)
    names = {entry["name"] for entry in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert f"layer {layers[0]} ({next(iter(kinds))}) / experts" in names


def test_little_of_an_update_belongs_to_nothing(tmp_path):
    shares = []
    for number in range(5):  # the machine may be busy with something else
        costs = measure(preset("smlp_tiny", **SMALL), one_process(4), 2, 2, CPU, tmp_path / f"{number}.json").costs
        shares.append(costs["parts"]["other"]["share"])
        if shares[-1] < 0.2:
            break
    assert min(shares) < 0.2, shares


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.05)
        return grad, None


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("slow", "owner"),
    [
        (lambda model: model.blocks[2].token_moe.experts, ("layer 2 (tMoE)", "experts")),
        (lambda model: model.blocks[1].mixing.feature_moe.experts, ("layer 1 (sMoE)", "experts")),
        (lambda model: model.blocks[1].mixing.feature_moe.norm, "rest of sparse blocks"),
        (lambda model: model.blocks[3].proj_in, "dense blocks"),
        (lambda model: model.norm, "embedding, head and loss"),
    ],
    ids=["tMoE", "sMoE", "norm", "dense", "head"],
)
def test_slow_modules_are_found_in_both_passes(slow, owner, recompute, monkeypatch):
    """50 ms more in the forward and 50 ms in the backward pass."""
    config, made = preset("smlp_tiny", **SMALL, checkpoint_activations=recompute), []

    def slowed(config, ranks):
        model = Decoder(config, ranks)
        slow(model).register_forward_hook(lambda module, inputs, output: _Slow.apply(output, 0.05))
        made.append(model)
        return model

    monkeypatch.setattr("smlp.costs.profiled.model_of", slowed)
    costs = measure(config, one_process(4), 1, 1, CPU).costs
    assert spans.current_span() is None, "a range was left open"
    cost = costs["layers"][owner[0]][owner[1]] if isinstance(owner, tuple) else costs["parts"][owner]
    times = 3 if recompute and owner != "embedding, head and loss" else 2
    # nothing is counted twice
    assert_complete(costs)
    assert made and times * 50 <= cost["ms"] < costs["ms"]


def test_a_slow_assignment_is_not_the_gates(monkeypatch):
    from smlp.moe.routers import balanced

    solve = balanced.balanced_assignment
    monkeypatch.setattr(balanced, "balanced_assignment", lambda scores: (time.sleep(0.3), solve(scores))[1])
    layers = measure(preset("smlp_tiny", **SMALL), one_process(4), 1, 1, CPU).costs["layers"]
    assigning = [layers[name]["assignment"]["ms"] for name in layers if "tMoE" in name]
    assert min(assigning) >= 300
    assert max(layers[name]["gate"]["ms"] for name in layers) < min(assigning)


@pytest.mark.slow
def test_waiting_for_a_slow_rank():
    """In the forward pass it is skew; in the backward pass it is part of the all-to-all that waits."""
    fast, slow = run_ranks("costs_with_a_slow_rank", 2)
    for costs in (fast, slow):
        for name, stages in costs.items():
            assert all(stages[stage]["ms"] > 0 for stage in ("all-to-all out", "all-to-all back", "skew")), name
    # the ranks are compared with each other: on a busy machine everything takes longer, on both
    first, last = "layer 1 (sMoE)", "layer 2 (tMoE)"
    assert fast[first]["skew"]["ms"] > slow[first]["skew"]["ms"]
    assert fast[last]["all-to-all out"]["ms"] > slow[last]["all-to-all out"]["ms"]
    assert fast[last]["experts"]["ms"] < slow[last]["experts"]["ms"]


def test_ranges_cost_nothing_while_nobody_profiles(monkeypatch):
    assert span("x") is stage_of("layer 1", "gate") is stage("gate")
    trainer = _Trainer(preset("smlp_tiny", **SMALL), one_process(4), CPU)
    tokens = torch.randint(2, 40, (8, 10))
    calls = []
    enabled = spans._profiler_enabled
    monkeypatch.setattr(spans, "_profiler_enabled", lambda: calls.append(1) or enabled())
    trainer.update(tokens)
    monkeypatch.undo()
    best = []
    for work in (lambda: trainer.update(tokens), lambda: [_enter_stage() for _ in calls]):
        times = []
        for _ in range(7):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        best.append(min(times))
    assert len(calls) > 20 and best[1] < 0.01 * best[0], best


def _enter_stage() -> None:
    with stage_of("layer 1 (tMoE)", "gate"):
        pass


def test_names_of_ranges():
    with torch.profiler.profile() as profile:
        with stage_of("layer 3 (tMoE)", "gate"):
            assert spans.current_span() == "layer 3 (tMoE) / gate"
            with stage("assignment"), spans.backward_of(spans.current_span()):
                pass
        with spans.backward_of(None):
            assert spans.current_span() is None
    names = {event.name for event in profile.events()}
    assert {"layer 3 (tMoE) / gate", "layer 3 (tMoE) / assignment, backward"} <= names
    assert split_name("layer 3 (tMoE) / skew, backward") == ("layer 3 (tMoE)", "skew")
    assert split_name("layer 3 (tMoE), shuffle / skew") == ("layer 3 (tMoE)", "skew")
    assert split_name("layer 3, dense block") is None and split_name("a / b") is None


def test_blocks_are_named_only_as_long_as_asked_for():
    model = Decoder(preset("smlp_tiny", **SMALL))
    with named_parts(model):
        assert all(block._forward_hooks for block in model.blocks)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)


TINY = ["costs", "--arch", "smlp_tiny", "--tokens", "8", "--experts", "4", "--batch-size", "1", "--updates", "1"]


@pytest.mark.slow
def test_the_command_on_two_processes(tmp_path):
    trace, report = tmp_path / "trace.json", tmp_path / "costs.json"
    options = ["--npr", "2", "--trace", trace, "--json", report]  # as argparse allows
    run = run_python("-m", "smlp", *TINY, *options, timeout=100)
    assert run.rc == 0 and run.stderr == "", run.stderr
    assert "smlp_tiny: 2 ranks on cpu, 2 of 4 experts on each; 1 x 8 tokens on each\n" in run.stdout
    lines = {line[:25].strip(): line[25:].split() for line in run.stdout.splitlines()}
    assert lines["update"][1] == "100.0" and len(lines["layer 5 (tMoE)"]) == 8
    result = json.loads(report.read_text())
    assert len(result["by_rank"]) == 2 and result["experts_per_rank"] == 2
    for rank, seen in enumerate(result["by_rank"]):
        shares = [part["share"] for kind in ("stages", "parts") for part in seen["profiled"][kind].values()]
        assert sum(shares) == pytest.approx(1) and len(seen["update_ms"]) == 1
        names = [e["name"] for e in json.loads((tmp_path / f"trace.rank{rank}.json").read_text())["traceEvents"]]
        assert names.count("layer 5 (tMoE) / all-to-all back, backward") == 1


def test_the_command_times_encoders(capsys):
    assert main.main(["costs", "--arch", "amlp_mlm_tiny", "--tokens", "8", "--batch-size", "1", "--updates", "1"]) == 0
    assert "amlp_mlm_tiny: 1 rank on cpu; 1 x 8 tokens on each" in capsys.readouterr().out


def test_the_command_as_a_rank_of_a_launcher(tmp_path):
    arguments = [*TINY, "--trace", str(tmp_path / "trace.json")]
    shown = run_ranks("costs_command_of_a_launcher", 2, port=free_port(), arguments=arguments)
    assert "2 ranks on cpu" in shown[0] and shown[1] == ""
    for rank in range(2):
        names = [e["name"] for e in json.loads((tmp_path / f"trace.rank{rank}.json").read_text())["traceEvents"]]
        assert names.count("layer 5 (tMoE) / all-to-all back, backward") == 1


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--arch", "smlp_tyni"], ["smlp_tyni", "did you mean 'smlp_tiny'"]),
        (["--arch", "smlp_tiny", "--nproc", "0"], ["--nproc must be at least 1, got 0"]),
        (["--arch", "smlp_tiny", "--updates", "0"], ["--updates must be at least 1"]),
        (["--arch", "smlp_tiny", "--nproc", "2", "--expert-parallel-size", "4"], ["size of 4", "2 ranks", "8 experts"]),
        (["--arch", "dense_lm_tiny", "--experts", "4"], ["--experts has no effect for dense_lm_tiny"]),
        (["--arch", "smlp_tiny", "--tokens", "1"], ["a context of 1 tokens is too short: --tokens must be at least 2"]),
        (["--arch", "smlp_tiny", "--trace", "-"], ["--trace needs the name of a file"]),
        (["--arch", "smlp_tiny", "--trace", "no/such/folder/t.json"], ["--trace no/such/folder/t.json"]),
    ],
)
def test_mistakes_are_one_sentence(options, parts, capsys):
    assert main.main(["costs", *options]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("smlp: error: ") and all(part in error for part in parts), error


@pytest.mark.parametrize("option", ["--trace", "--json"])
def test_files_of_another_kind_are_not_written_over(option, tmp_path, capsys):
    mine, pipe = tmp_path / "notes.txt", tmp_path / "pipe"
    mine.write_text("something of value")
    assert main.main([*TINY, option, str(mine)]) == 1
    assert f"{option} {mine}: a file of another kind exists already" in capsys.readouterr().err
    assert mine.read_text() == "something of value"
    (tmp_path / "link.json").symlink_to(tmp_path / "none" / "x.json")
    assert main.main([*TINY, option, str(tmp_path / "link.json")]) == 1
    assert f"link.json: there is no folder {tmp_path / 'none'}" in capsys.readouterr().err
    os.mkfifo(pipe)
    if option == "--trace":
        assert main.main([*TINY, option, str(pipe)]) == 1
        assert f"cannot write --trace {pipe}: nothing reads from this pipe" in capsys.readouterr().err


def test_a_report_does_not_replace_the_trace_of_a_rank(tmp_path, monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    files = ["--trace", str(tmp_path / "t.json"), "--json", str(tmp_path / "t.rank0.json")]
    assert main.main([*TINY, *files]) == 1
    assert "t.rank0.json" in capsys.readouterr().err


def test_ranks_of_a_launcher_start_no_more(monkeypatch, capsys):
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main.main([*TINY, "--nproc", "2"]) == 1
    assert "--nproc 2, but" in capsys.readouterr().err
    measured = []
    monkeypatch.setattr("smlp.cli.costs._measure", lambda args, config, place, *rest: measured.append(place.rank))
    assert main.main([*TINY, "--nproc", "4"]) == 0 and measured == [1]


def test_a_rank_without_the_others_gives_up():
    (shown,) = run_ranks(
        "costs_command_of_a_launcher", 1, port=free_port(), arguments=[*TINY, "--timeout", "1"], size=2
    )
    assert re.match(r"smlp: error: rank 0 of 2 on \S+ cannot reach the others at env:// \(", shown)
    assert shown.count("\n") == 1
