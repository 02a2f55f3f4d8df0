"""Profiles of training runs: ``--profile-updates``, and speed and memory in the training log."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from launched import make_plugin
from running import USER_DIR
from test_breakdown import check_sums

from smlp.cli import main
from smlp.config.presets import preset
from smlp.costs.breakdown import as_text
from smlp.costs.formula import training_flops
from smlp.errors import UserError
from smlp.fairseq_compat.profiling import WARM_UP
from smlp.fairseq_compat.settings import check_profiling

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]

T, BATCH = 32, 4
SIZES = {"embed_dim": 64, "ffn_dim": 128, "num_dense_layers": 1, "num_sparse_layers": 1, "num_experts": 4}
PROFILE = ["--profile-updates", 2]


def train(data, save_dir, *more, arch="smlp_tiny", user_dir=USER_DIR, ranks=1) -> dict:
    options = [word for name, value in SIZES.items() for word in (f"--{name.replace('_', '-')}", value)]
    args = [data, "--user-dir", user_dir, "--task", "language_modeling", "--arch", arch, *options]
    args += ["--tokens-per-sample", T, "--batch-size", BATCH, "--optimizer", "adam", "--lr", 1e-3, "--num-workers", 0]
    args += ["--log-format", "json", "--log-interval", 1, "--no-epoch-checkpoints", "--save-dir", save_dir, *more]
    return {"tool": "train", "args": args, "ranks": ranks, "timeout": 60}


@pytest.fixture(scope="module")
def runs(tiny_data, tmp_path_factory, run_fairseq_many):
    """Folder and outcome of each run."""
    folder = tmp_path_factory.mktemp("profiled")
    plugin = make_plugin(
        folder / "plugin" / "stopping",
        'before(Trainer, "train_step", lambda self: self.get_num_updates() == 4, '
        "lambda: os.kill(os.getpid(), signal.SIGTERM))\n",
    )
    usual = ["--max-update", 6, "--clip-norm", 1, "--dropout", 0.2]
    spread = ["--max-update", 5, "--update-freq", 2, "--checkpoint-activations", "--ddp-backend", "legacy_ddp"]
    cases = {
        "plain": train(tiny_data, folder / "plain", *usual),
        "profiled": train(tiny_data, folder / "profiled", *usual, *PROFILE, "--profile-dir", folder / "new" / "dir"),
        "two ranks": train(tiny_data, folder / "two ranks", *spread, *PROFILE, ranks=2),
        "short": train(
            *(tiny_data, folder / "short", "--max-update", 4, "--profile-updates", 50), arch="smlp_partial_tiny"
        ),
        "too short": train(tiny_data, folder / "too short", "--max-update", WARM_UP, *PROFILE),
        "stopped": train(tiny_data, folder / "stopped", *usual, "--profile-updates", 9, user_dir=plugin),
        "full": {
            **train(tiny_data, folder / "full", *usual, *PROFILE, "--no-save", "--disable-validation"),
            "file_size_limit": 10**5,
        },
        "no folder": train(tiny_data, folder / "no folder", *usual, *PROFILE, "--profile-dir", "/dev/null/x"),
    }
    return folder, dict(zip(cases, run_fairseq_many(list(cases.values()), timeout=150), strict=True))


def report_of(folder, rank=0) -> dict:
    return json.loads((folder / f"profile.rank{rank}.json").read_text())


def events_of(folder, rank=0) -> list[dict]:
    with gzip.open(folder / f"profile.rank{rank}.trace.json.gz", "rt") as file:
        return json.load(file)["traceEvents"]


def vocab_size(data) -> int:
    return len((data / "dict.txt").read_text().splitlines()) + 4


@pytest.mark.slow
def test_files_of_a_profiled_run(runs, tiny_data):
    folder, outcomes = runs
    run, place = outcomes["profiled"], folder / "new" / "dir"
    assert run.rc == 0, str(run)
    names = {f"profile.rank0.{kind}" for kind in ("json", "txt", "trace.json.gz")}
    assert {path.name for path in place.iterdir()} == names, "and nothing half-written"
    report = report_of(place)
    check_sums(report)
    assert (report["updates"], report["warm_up_updates"], report["ranks"]) == (2, WARM_UP, 1)
    config = preset("smlp_tiny", **SIZES, max_tokens=T, vocab_size=vocab_size(tiny_data))
    assert report["tokens"] == sum(entry["wpb"] for entry in logged(run.stdout)[WARM_UP : WARM_UP + 2])
    assert report["update"]["flops"] == pytest.approx(report["tokens"] / 2 * training_flops(config))
    times = {row["component"]: row for row in report["components"]}
    assert {"embedding", "norms", "dense projections", "spatial", "router", "dispatch and combine", "experts"} < set(
        times
    )
    assert {"output layer and loss", "rest of blocks", "router health", "optimizer", "other"} < set(times)
    assert "all-to-all" not in times and "attention" not in times
    for name in ("norms", "dense projections", "spatial", "experts", "output layer and loss"):
        assert times[name]["forward_ms"] > 0 and times[name]["backward_ms"] > 0, name
    text = (place / "profile.rank0.txt").read_text()
    assert text.splitlines()[0].startswith("rank 0 of 1 on cpu in float32; means of 2 updates of 12")
    assert text in run.stdout and as_text(report) in text


def test_the_trace_has_our_ranges(runs):
    folder, _ = runs
    events = events_of(folder / "new" / "dir")
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert names.count("update") == 2 and names.count("layer 1 (tMoE) / experts") == 2
    assert {"forward", "backward", "layer 1, sparse block", "layer 0, dense block / norms", "optimizer"} <= set(names)
    starts = [event["id"] for event in events if event["ph"] == "s"]
    assert starts and len(starts) == len(set(starts)), "arrows of one update end in it"


def test_training_is_the_same_bit_for_bit(runs):
    folder, outcomes = runs
    states = [torch.load(folder / name / "checkpoint_last.pt") for name in ("plain", "profiled")]
    assert outcomes["plain"].rc == 0, outcomes["plain"].stderr
    for name, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][name]), name
    for number, moments in states[0]["last_optimizer_state"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(
                torch.as_tensor(value), torch.as_tensor(states[1]["last_optimizer_state"]["state"][number][name])
            )
    losses = [[(e["loss"], e["gnorm"]) for e in logged(outcomes[name].stdout)] for name in ("plain", "profiled")]
    assert losses[0] == losses[1] and len(losses[0]) == 6


def test_every_rank_has_its_own(runs, tiny_data):
    folder, outcomes = runs
    run = outcomes["two ranks"]
    assert run.rc == 0, str(run)
    config = preset("smlp_tiny", **SIZES, max_tokens=T, vocab_size=vocab_size(tiny_data))
    reports = [report_of(folder / "two ranks", rank) for rank in range(2)]
    tokens = sum(entry["wpb"] for entry in logged(run.stdout)[WARM_UP : WARM_UP + 2])
    assert sum(report["tokens"] for report in reports) == tokens > 1.5 * 2 * 2 * BATCH * T, "of two micro-batches"
    for rank in range(2):
        report = reports[rank]
        check_sums(report)
        assert (report["rank"], report["ranks"], report["updates"]) == (rank, 2, 2)
        assert report["update"]["flops"] == pytest.approx(report["tokens"] / 2 * training_flops(config))
        times = {row["component"]: row for row in report["components"]}
        assert times["all-to-all"]["forward_ms"] > 0 and times["all-to-all"]["backward_ms"] > 0
        names = [event["name"] for event in events_of(folder / "two ranks", rank)]
        # once in the forward pass and once where it is computed again, of two micro-batches of two updates
        assert names.count("layer 1 (tMoE) / experts") == 8
    assert run.stdout.count("profile: rank 0 of 2") == 1 and "profile: rank 1" not in run.stdout


@pytest.mark.parametrize(
    ("name", "profiled", "said"),
    [
        (
            "short",
            1,
            f"--profile-updates 50, but the run ended after 4 updates, the first {WARM_UP} of which warm up: 1 was",
        ),
        ("too short", 0, f"--profile-updates 2, but the run ended after {WARM_UP} updates"),
        ("stopped", 2, "--profile-updates 9, but the run ended after 5 updates"),
    ],
)
def test_a_run_that_ends_early_writes_what_it_has(runs, name, profiled, said):
    folder, outcomes = runs
    run = outcomes[name]
    assert run.rc == (75 if name == "stopped" else 0), run.stderr
    assert said in run.stdout
    if profiled:
        assert report_of(folder / name)["updates"] == profiled
        names = [event["name"] for event in events_of(folder / name)]
        assert names.count("update") == profiled
    else:
        assert "none were profiled" in run.stdout
    assert len(list((folder / name).glob("profile.*"))) == (3 if profiled else 0)


def test_a_full_disk_costs_the_profile_and_not_the_run(runs):
    folder, outcomes = runs
    run = outcomes["full"]
    assert run.rc == 0 and len(logged(run.stdout)) == 6, run.stderr
    assert f"no profile: cannot write to {folder / 'full'}: " in run.stdout
    assert list((folder / "full").glob("profile*")) == []


def test_wrong_options_are_refused_before_anything_is_built(runs):
    folder, outcomes = runs
    run = outcomes["no folder"]
    (error,) = [line for line in run.errors if line.startswith("smlp: error: ")]
    assert run.rc == 1 and "--profile-dir: /dev/null/x cannot be made: /dev/null is not a folder" in error
    assert "num. shared model params" not in run.stdout and not (folder / "no folder").exists()


@pytest.mark.parametrize(
    ("num_updates", "place", "said"),
    [
        (0, None, "--profile-updates must be at least 1, got 0"),
        (-3, "here", "--profile-updates must be at least 1, got -3"),
        (None, "here", "--profile-dir here has no effect without --profile-updates"),
    ],
)
def test_options_that_make_no_sense(num_updates, place, said):
    with pytest.raises(UserError, match=re.escape(said)):
        check_profiling(SimpleNamespace(model=SimpleNamespace(profile_updates=num_updates, profile_dir=place)))


def test_options_that_make_sense(tmp_path):
    for model in ({}, {"profile_updates": 1}, {"profile_updates": 1, "profile_dir": str(tmp_path / "a" / "b")}):
        check_profiling(SimpleNamespace(model=SimpleNamespace(**model)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--profile", "0"], "--profile needs a number of at least 1, not '0'"),
        (["--profile", "data"], "--profile needs a number of at least 1, not 'data'"),
        (["data", "--profile"], "--profile needs a number of at least 1, not ''"),
        (["data", "--profile=2", "--profile-updates", "3"], "are the same option"),
    ],
)
def test_the_number_is_needed(options, said, capsys):
    assert main.main(["train", *options]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("smlp: error: --profile") and said in error


def test_the_plan_is_of_the_same_option(tiny_data, capsys):
    assert main.main(["train", "--dry-run", "--profile", "3", "--cpu", str(tiny_data)]) == 0
    assert capsys.readouterr().out.rstrip().endswith(f"{tiny_data} --profile-updates 3")


def logged(output: str) -> list[dict]:
    lines = re.findall(r"\| INFO \| train_inner \| (\{.*\})", output)
    return [{key: float(value) for key, value in json.loads(line).items() if value is not None} for line in lines]


@pytest.mark.parametrize(
    ("name", "arch", "ranks"),
    [("plain", "smlp_tiny", 1), ("short", "smlp_partial_tiny", 1), ("two ranks", "smlp_tiny", 2)],
)
def test_mfu_is_words_per_second_in_other_units(runs, tiny_data, name, arch, ranks):
    """Also where a share of the tokens is not counted as words: those that only choose experts cost as much."""
    _, outcomes = runs
    config = preset(arch, **SIZES, max_tokens=T, vocab_size=vocab_size(tiny_data))
    (rate,) = re.findall(r"measured matmul rate: ([\d.]+) GFLOP/s \(float32, cpu, each rank\)", outcomes[name].stdout)
    flops_per_word = training_flops(config) * T / (T - config.prefix_tokens)
    entries = logged(outcomes[name].stdout)
    assert len(entries) >= 4
    for entry in entries[1:]:
        want = 100 * entry["wps"] * flops_per_word / (float(rate) * 1e9 * ranks)
        assert entry["mfu"] == pytest.approx(want, rel=0.02)
        assert 0.05 < entry["mem_gb"] < 8
        assert 0 <= entry["data_wait"] < 50
    valid = [line for line in outcomes[name].stdout.splitlines() if "| INFO | valid |" in line]
    assert valid and all(name not in line for line in valid for name in ("mfu", "mem_gb", "data_wait"))


@pytest.mark.parametrize("without", [False, True])
def test_runs_go_on_from_checkpoints_with_and_without_these_meters(
    runs, tiny_data, tmp_path, run_fairseq_many, without
):
    folder, _ = runs
    shutil.copytree(folder / "plain", tmp_path / "run")
    path = tmp_path / "run" / "checkpoint_last.pt"
    state = torch.load(path)
    meters = state["extra_state"]["metrics"]
    new = {"_model_flops", "mem_gb", "data_wait"}
    assert new <= {key for _, key, _, _ in meters["train"]}
    if without:
        for name, kept in meters.items():
            meters[name] = [meter for meter in kept if meter[1] not in new]
        torch.save(state, path)
    (run,) = run_fairseq_many(
        [train(tiny_data, tmp_path / "run", "--max-update", 8, "--clip-norm", 1, "--dropout", 0.2)]
    )
    assert run.rc == 0, str(run)
    first, second = logged(run.stdout)
    assert (first["num_updates"], second["num_updates"]) == (7, 8)
    assert second["mfu"] > 0 and second["mem_gb"] > 0
