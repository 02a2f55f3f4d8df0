"""What an experiment's runs cost, measured before them, and how models are timed in turn after them."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from planned_experiment import FILE, reader

import smlp
from smlp.costs.formula import parameters
from smlp.experiments import dry_run, local, speed
from smlp.experiments.folder import DONE, Folder
from smlp.experiments.local import Machine, time_here
from smlp.experiments.plan import main_runs, tuning_runs
from smlp.experiments.speed import TimedUpdates, dtype_of, dtype_of_run
from smlp.nn.decoder import Decoder


@pytest.fixture
def planned(tmp_path):
    """An experiment with its models and folder."""
    return reader(tmp_path)


def test_validations_take_time_too(planned, monkeypatch):
    experiment, models, _ = planned(FILE + "evaluate: {validations: 4}\nrun: {jobs: 1}\n")
    monkeypatch.setattr(dry_run, "measure_update", lambda model, experiment, threads: 0.5)
    runs = [*tuning_runs(experiment, models)[:1], *main_runs(experiment, models, {"a": 0.001})]
    without, held_out = (dry_run.estimate(experiment, models, runs, 1, tokens).seconds for tokens in (0, 3 * 1024 * 10))
    assert held_out - without == pytest.approx((1 + 4 + 1) * 10 * 0.5), "a forward pass is a third of an update"


def test_costs(planned, monkeypatch):
    monkeypatch.setattr(dry_run, "measure_update", lambda model, experiment, threads: {"a": 0.5, "b": 1.0}[model.name])
    experiment, models, _ = planned(FILE + "run: {jobs: 2, tflops: 100, mfu: 0.5}\n")
    runs = main_runs(experiment, models, {"a": 0.001, "b": 0.001})
    here = dry_run.estimate(experiment, models, runs, threads=1)
    saving = 8 * dry_run.CHECKPOINT_FILES * 12 * parameters(models[1].config, 1).total / dry_run.BYTES_PER_SECOND
    longer = 100 * dry_run.OVERHEAD + saving + dry_run.SECONDS_AROUND
    assert here.seconds == pytest.approx(longer), "the longer of two side by side"
    elsewhere = dry_run.estimate(experiment, models, runs, threads=None)
    per_update = elsewhere.seconds_per_update
    assert sum(per_update.values()) * 100 == pytest.approx(elsewhere.flops / 50e12)
    sizes = [sum(p.numel() for p in Decoder(model.config).parameters()) for model in models]
    assert elsewhere.disk_bytes == 12 * sum(sizes)
    assert elsewhere.most_disk_bytes == dry_run.CHECKPOINT_FILES * 12 * sum(sizes)
    one_by_one = dry_run.estimate(
        replace(experiment, resources=replace(experiment.resources, jobs=1)), models, runs, threads=None
    )
    assert one_by_one.most_disk_bytes == 12 * sum(sizes) + 2 * 12 * max(sizes)


@pytest.mark.parametrize(
    ("where", "sizes"),
    [("jobs: 2", (0, 6)), ("jobs: 9", (3, 24)), ("where: slurm, gpus_per_node: 1, jobs: 2", (24, 24))],
)
def test_a_grid_that_is_wider_than_the_comparison_takes_more_disk(planned, monkeypatch, where, sizes):
    """Three files of each run at a time; on a cluster, of all runs until the next call."""
    monkeypatch.setattr(dry_run, "measure_update", lambda model, experiment, threads: 0.5)
    grid = f"tune: {{lr: {[n / 1000 for n in range(1, 9)]}, updates: 10}}\nrun: {{{where}}}\n"
    experiment, models, _ = planned(FILE[: FILE.index("tune")] + grid)
    runs = [*tuning_runs(experiment, models), *main_runs(experiment, models, {"a": 0.001})]
    a, b = (12 * parameters(model.config, 1).total for model in models)
    assert a < b, "so that the largest are those of b"
    assert dry_run.estimate(experiment, models, runs, 1).most_disk_bytes == sizes[0] * a + sizes[1] * b


def test_a_cluster_of_cpus_is_not_one_of_gpus(planned, monkeypatch, capsys):
    monkeypatch.setattr(dry_run, "measure_update", pytest.fail)
    run = "run: {where: slurm, nodes: 2, tasks_per_node: 4, threads: 3}\n"
    experiment, models, folder = planned(FILE + run)
    alone = replace(experiment, resources=replace(experiment.resources, nodes=1, tasks_per_node=1, ranks=1))
    grid = tuning_runs(experiment, models)
    eight, one = (dry_run.estimate(each, models, grid, threads=None) for each in (experiment, alone))
    assert eight.device_hours < 1.01 * one.device_hours, "hours of runs, not of ranks"
    assert eight.how.startswith("30% of 0.3 TFLOP/s for each process (run.mfu, run.tflops)")
    monkeypatch.setattr(dry_run, "find_data", lambda *args: None)
    experiment = replace(experiment, vocab_size=64)
    dry_run.dry_run(experiment, folder)
    said = capsys.readouterr().out
    assert "TFLOP/s for each process" in said and "hours of all runs one after the other" in said
    assert said.endswith(" --cpu\n"), "as submit.sh starts it"


def test_runs_begin_when_the_grid_has_ended(planned, monkeypatch):
    monkeypatch.setattr(dry_run, "measure_update", lambda model, experiment, threads: 0.5)
    experiment, models, _ = planned(FILE + "run: {jobs: 8}\n")
    grid, runs = tuning_runs(experiment, models), main_runs(experiment, models, {"a": 0.001, "b": 0.001})
    first, then, both = (dry_run.estimate(experiment, models, some, 1).seconds for some in (grid, runs, [*grid, *runs]))
    assert both == pytest.approx(first + then)
    assert dry_run._end_of_the_last([1.0, 2.0], 10**14) == 2.0, "most of so many jobs have nothing to do"


def test_a_tuned_precision_is_that_of_the_run(tmp_path):
    run = Folder(tmp_path).run("runs/a-s1")
    assert dtype_of_run(run, ["--bf16"]) == torch.bfloat16, "a run of an older version"
    run.update_state(made_with={"lr": 1.0, "bf16": True})
    assert dtype_of_run(run, []) == torch.bfloat16
    run.update_state(made_with={"lr": 1.0, "bf16": False})
    assert dtype_of_run(run, []) == torch.float32


@pytest.mark.parametrize(("timed", "again"), [({}, True), ({"b": 1}, True), ({"a": 1}, False)])
def test_a_model_that_came_later_is_timed(planned, monkeypatch, timed, again):
    experiment, models, folder = planned(FILE + "run: {jobs: 8}\n")
    runs = main_runs(experiment, models, {"a": 1.0e-3, "b": 1.0e-3})
    started = []
    monkeypatch.setattr(local, "num_cores", lambda: 6)
    monkeypatch.setattr(local, "run_chains", lambda chains, jobs, watch: started.append(chains[0].next_step(0)))
    folder.path.mkdir()
    if timed:
        folder.speed.write_text(json.dumps({"models": timed}))
    assert time_here(experiment, folder, runs, Machine(2)) is None
    assert not started, "no run is done"
    folder.run(runs[0].folder).update_state(state=DONE)
    time_here(experiment, folder, runs, Machine(2))
    assert [step.command[-2:] for step in started] == ([[str(folder.path), "9"]] if again else [])
    assert all(step.environment["OMP_NUM_THREADS"] == "6" for step in started), "no more than there are cores"


def test_a_signal_ends_the_timing(planned, monkeypatch):
    experiment, models, folder = planned()
    runs = main_runs(experiment, models, {"a": 1.0e-3, "b": 1.0e-3})
    folder.run(runs[0].folder).update_state(state=DONE)
    monkeypatch.setattr(local, "this_module", lambda name: [sys.executable, "-c", "import time; time.sleep(60)"])
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    start = time.monotonic()
    assert time_here(experiment, folder, runs, Machine(1)) == signal.SIGTERM
    assert time.monotonic() - start < 30
    timer.join()


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        (["--lr", "1"], torch.float32),
        (["--bf16"], torch.bfloat16),
        (["--memory-efficient-bf16"], torch.bfloat16),
        (["--lr", "1", "--fp16"], torch.float16),
    ],
)
def test_updates_are_timed_in_the_precision_of_the_training(planned, words, dtype):
    assert dtype_of(words) == dtype
    config = planned()[1][1].config
    timed = TimedUpdates(Decoder(config), "cpu", dtype, 1e-3)
    tokens = torch.randint(4, 64, (2, 17))
    before = timed.model.embedding.weight.clone()
    for _ in range(3):
        timed.update([(tokens[:, :-1], tokens[:, 1:])] * 2)
    assert len(timed.seconds) == 3
    assert not torch.equal(timed.model.embedding.weight, before)
    assert all(weight.dtype == dtype and weight.isfinite().all() for weight in timed.model.parameters())


def test_timed_updates_in_16_bits_change_weights_by_less_than_these_tell_apart(planned):
    """As the training's optimizer does: in sum they are seen."""
    torch.manual_seed(1)
    timed = TimedUpdates(Decoder(planned()[1][0].config), "cpu", torch.bfloat16, 3e-4)
    gain = timed.model.norm.weight
    tokens = torch.randint(4, 64, (2, 17))
    changed = []
    for _ in range(40):  # each by 3e-4 or so; between bfloat16's numbers below 1 lie 4e-3
        timed.update([(tokens[:, :-1], tokens[:, 1:])])
        changed.append(int((gain != 1).sum()))
    assert changed[3] == 0 < changed[-1]


def test_a_text_shorter_than_an_update_is_timed_over_and_over(tmp_path, monkeypatch):
    folder = Folder(tmp_path)
    settings = {"batch_size": 2, "tokens_per_sample": 16, "seeds": [1], "models": [{"name": "a", "recipe": []}]}
    folder.experiment.write_text(json.dumps(settings))
    folder.data.write_text(json.dumps({"data": "data-bin"}))
    decoder = smlp.build("gmlp_lm_tiny", vocab_size=40, max_tokens=16, embed_dim=16, ffn_dim=16)
    seen = []
    decoder.register_forward_pre_hook(lambda _, given: seen.extend(given[0].flatten().tolist()))
    monkeypatch.setattr(speed, "_trained", lambda *of: folder.run("runs/a-s1"))
    monkeypatch.setattr(speed, "load_pretrained", lambda path: SimpleNamespace(core=decoder))
    monkeypatch.setattr(speed, "read_fairseq_tokens", lambda path: SimpleNamespace(tokens=np.arange(4, 34)))
    found = speed.time_models(folder, rounds=2)
    assert len(found["models"]["a"]["seconds_per_update"]) == 2 and found["models"]["a"]["tokens_per_update"] == 32
    assert seen == [4 + place % 30 for place in range(3 * speed.UPDATES_IN_TURN * 32)]


def test_the_first_update_of_a_turn_is_not_counted(tmp_path, monkeypatch):
    """It waits for weights that the other models drove out of the cache."""

    class Timed:
        def __init__(self, name, *_):
            self.name, self.seconds = name, []

        def update(self, batches):
            turns.append(self.name)
            self.seconds.append(9.0 if len(turns) < 2 or turns[-2] != self.name else float(len(self.seconds)))

    turns, folder = [], Folder(tmp_path)
    models = [{"name": name, "recipe": []} for name in "ab"]
    folder.experiment.write_text(json.dumps({"batch_size": 2, "tokens_per_sample": 16, "seeds": [1], "models": models}))
    folder.data.write_text(json.dumps({"data": "data-bin"}))
    monkeypatch.setattr(speed, "_trained", lambda folder, model, experiment: folder.run(model["name"]))
    monkeypatch.setattr(speed, "load_pretrained", lambda path: SimpleNamespace(core=path.parent.name))
    monkeypatch.setattr(speed, "read_fairseq_tokens", lambda path: SimpleNamespace(tokens=np.arange(4, 34)))
    monkeypatch.setattr(speed, "TimedUpdates", Timed)
    found = speed.time_models(folder, rounds=2)["models"]
    assert "".join(turns) == "aaaabbbb" * 3
    assert [found[name]["seconds_per_update"] for name in "ab"] == [[6, 10]] * 2


def test_updates_of_a_balanced_hash_are_measured_before_there_are_data(planned):
    experiment, models, _ = planned(FILE.replace("smlp_tiny}", "hash_lm_tiny}"))
    experiment = replace(experiment, batch_size=1)
    hashed = replace(models[1], config=smlp.preset("hash_lm_tiny", vocab_size=64, max_tokens=128, hash_kind="balanced"))
    assert 0 < dry_run.measure_update(hashed, experiment, threads=1) < 60
