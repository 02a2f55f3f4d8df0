"""Around the runs of an experiment, without any: what the grid chooses, what a machine gives, progress."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoint_states import save
from planned_experiment import FILE, log, reader

import smlp
from smlp.checkpoint.opened import open_checkpoint
from smlp.checkpoint.output import write_in_parts
from smlp.cli.main import main
from smlp.errors import UserError
from smlp.evaluation.curves import log_records
from smlp.experiments import dry_run, local, progress, slurm
from smlp.experiments import run as experiment_run
from smlp.experiments.folder import DONE, FAILED, RUNNING, STOPPED, WAITING, Folder
from smlp.experiments.json_files import read_json, write_json
from smlp.experiments.local import Machine, RunChain, is_trained, what_is_not_scored
from smlp.experiments.plan import as_json, main_runs, tuning_runs
from smlp.experiments.processes import Ended
from smlp.experiments.progress import Progress, Reached, duration, reached
from smlp.experiments.scores import AGREEMENT, HALF_AGREEMENT, check_agreement
from smlp.experiments.tuning import at_edge, check_runs, choose, chosen_so_far
from smlp.launch.environment import git_revision, keep_difference


@pytest.fixture
def planned(tmp_path):
    """An experiment with its models and folder."""
    return reader(tmp_path)


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert reached(tmp_path / "pipe") == Reached()
    with pytest.raises(UserError, match=r"cannot be read .nothing writes to this pipe"):
        read_json(tmp_path / "pipe")
    with pytest.raises(UserError, match="cannot be read: nothing writes to this pipe"):
        log_records(tmp_path / "pipe")


def test_where_a_run_is(tmp_path):
    run = Folder(tmp_path).run("runs/a-s1")
    assert reached(run.log) == Reached(0, None, None)
    log(run, 7, train=4.0)
    assert reached(run.log) == Reached(7, 16.0, None)
    log(run, 8, train=4.0, valid=3.0)
    assert reached(run.log) == Reached(8, 16.0, 8.0)
    with run.log.open("a") as lines:
        lines.write("\n" + json.dumps({"test_loss": "3.0", "test_num_updates": "9"}))
    assert reached(run.log) == Reached(9, 16.0, 8.0), "of a run that has no subset called valid"


def test_the_grid_chooses_the_lowest_validation_loss(planned):
    experiment, models, folder = planned()
    runs = tuning_runs(experiment, models)
    losses = {"a-0.001": 5.0, "a-0.002": 4.0, "b-0.001": 3.0}
    for run in runs:
        own = folder.run(run.folder)
        if run.name in losses:
            log(own, 10, valid=losses[run.name])
            own.update_state(state=DONE)
        else:
            own.update_state(state=FAILED)
    assert choose(experiment, models, runs, folder) == {"a": 0.002, "b": 0.001}
    record = read_json(folder.tuned)
    assert record["option"] == "--lr" and record["values"] == [0.001, 0.002]
    assert record["results"] == {"a": {"0.001": 32.0, "0.002": 16.0}, "b": {"0.001": 8.0, "0.002": None}}
    assert [run.recipe for run in main_runs(experiment, models, record["chosen"])] == [{"lr": 0.002}, {"lr": 0.001}]
    for run in runs:  # the first subset chooses, whatever its name
        if (own := folder.run(run.folder)).log.is_file():
            own.log.write_text(own.log.read_text().replace("valid_", "test_"))
    other = replace(experiment, evaluation=replace(experiment.evaluation, subsets=("test",)))
    assert choose(other, models, runs, folder) == {"a": 0.002, "b": 0.001}
    with pytest.raises(UserError, match=r"train.log has no validation on valid, the first of evaluate.subsets, which"):
        choose(experiment, models, runs, folder)


def test_another_choice_is_not_recorded_for_runs_that_are_trained(planned):
    experiment, models, folder = planned()
    runs = tuning_runs(experiment, models)

    def finish(run, bits):
        own = folder.run(run.folder)
        log(own, 10, valid=bits)
        own.update_state(state=DONE, trained=True, made_with=run.made_with(experiment))

    for run in runs:
        finish(run, 5.0 if run.recipe["lr"] == 0.001 else 6.0)
    for run in main_runs(experiment, models, choose(experiment, models, runs, folder)):
        finish(run, 5.0)
    before = folder.tuned.read_bytes()
    experiment = planned(FILE.replace("2.0e-3]", "2.0e-3, 4.0e-3]"))[0]
    runs = tuning_runs(experiment, models)
    finish(next(run for run in runs if run.name == "a-0.004"), 4.0)
    with pytest.raises(UserError, match=r"a-s1 was made with lr = 0.001, and the experiment now says 0.004"):
        choose(experiment, models, runs, folder)
    assert folder.tuned.read_bytes() == before


@pytest.mark.parametrize("state", [FAILED, STOPPED])
def test_a_run_of_the_grid_that_ends_badly_and_its_retry(planned, monkeypatch, capsys, state):
    """A failed one leaves the choice to the others, which its retry does not change; a stopped one is waited for."""
    experiment, models, folder = planned()
    folder.path.mkdir()
    bad, said = ["tune/b-0.002"], ["train failed: it has diverged"]

    def run_here(experiment, folder, data, runs, *rest):
        for run in runs:
            own = folder.run(run.folder)
            if run.folder in bad:
                own.update_state(state=state, message=said[0] if state == FAILED else None)
            else:
                log(own, run.updates, valid=5.0 - 1e3 * run.recipe["lr"])
                own.update_state(state=DONE, trained=True, message=None)

    monkeypatch.setattr(experiment_run, "_prepare", lambda experiment, folder: ("data-bin", models))
    monkeypatch.setattr(experiment_run, "run_here", run_here)
    monkeypatch.setattr(experiment_run, "time_here", lambda *args: None)
    monkeypatch.setattr(experiment_run, "_note_environment", lambda *args: None)
    if state == FAILED:  # a rate that is too high is no failure
        assert experiment_run.run_experiment(experiment, folder) == 0
        assert "failed: tune/b-0.002: train failed: it has diverged" in capsys.readouterr().out
        (name,), bad[:] = bad, []  # nor is it trained again
        assert experiment_run.run_experiment(experiment, folder) == 0
        assert "failed: tune/b-0.002: train failed: it has diverged" in capsys.readouterr().out
        bad.append(name)
        folder.run(name).update_state(message="of another kind")
    said[0] = "train failed"
    assert experiment_run.run_experiment(experiment, folder) == 1
    printed = capsys.readouterr().out
    assert ("failed: tune/b-0.002: train failed" if state == FAILED else "not trained yet: tune/b-0.002") in printed
    assert folder.tuned.exists() == (state == FAILED)
    bad.clear()
    for _ in range(2):
        assert experiment_run.run_experiment(experiment, folder) == 0
        check_runs(experiment, models, folder)
        record = read_json(folder.tuned)
        assert record["chosen"] == {"a": 0.002, "b": 0.001 if state == FAILED else 0.002}
        assert None not in record["results"]["b"].values()


@pytest.mark.parametrize("bits", [1500.0, math.inf, math.nan])
def test_a_run_of_the_grid_that_diverged_is_no_choice(planned, bits):
    """Its perplexity is too large for a number; so is that of its last validation, whatever an earlier one said."""
    experiment, models, folder = planned()
    for run in tuning_runs(experiment, models):
        own = folder.run(run.folder)
        log(own, 10, valid=bits if run.recipe["lr"] == 0.002 else 5.0)
        if run.name == "b-0.002":
            early = json.dumps({"valid_loss": "2.0", "valid_num_updates": "5"})
            own.log.write_text(early + "\n" + own.log.read_text())
        own.update_state(state=DONE)
    assert choose(experiment, models, tuning_runs(experiment, models), folder) == {"a": 0.001, "b": 0.001}
    assert read_json(folder.tuned)["results"]["b"] == {"0.001": 32.0, "0.002": None}


@pytest.mark.parametrize(
    ("values", "chosen", "edge"),
    [
        ([1e-3, 2e-3, 4e-3], {"a": 1e-3, "b": 2e-3, "c": 4e-3}, ["a", "c"]),
        ([4, 1, 2], {"a": 2, "b": 4}, ["b"]),
        ([1e-3], {"a": 1e-3}, []),
        (["fixed", "inverse_sqrt"], {"a": "fixed"}, []),
        ([True, False], {"a": True}, []),
        ([0.1, "none"], {"a": 0.1}, []),
    ],
)
def test_what_lies_at_the_edge_of_a_grid(values, chosen, edge):
    assert at_edge(values, chosen) == edge


def test_a_model_whose_grid_failed_is_left_out(planned):
    experiment, models, folder = planned()
    runs = tuning_runs(experiment, models)
    for run in runs:
        folder.run(run.folder).update_state(state=FAILED)
    assert choose(experiment, models, runs, folder) == {}
    assert main_runs(experiment, models, {}) == []


def test_what_a_run_gets_of_a_machine(planned, monkeypatch):
    monkeypatch.setattr(local, "num_cores", lambda: 12)

    def machine(place, gpus):
        return Machine.of(planned(FILE + f"run: {{{place}}}\n")[0], gpus)

    assert machine("jobs: 3", 0) == Machine(4)
    assert machine("jobs: 3, threads: 2, device: cpu", 8) == Machine(2)
    assert machine("jobs: 2", 2).gpus == ((0,), (1,))
    assert machine("jobs: 3", 2).gpus == ((0,), (1,), (0,)), "runs of one rank may share a GPU"
    shared = {(jobs, gpus): machine(f"jobs: {jobs}", gpus).runs_on_a_gpu for jobs in (1, 2, 3, 5) for gpus in (0, 2)}
    assert shared == {(1, 0): 1, (2, 0): 1, (3, 0): 1, (5, 0): 1, (1, 2): 1, (2, 2): 1, (3, 2): 2, (5, 2): 3}
    two = machine("jobs: 2, ranks: 2", 4)
    assert two.runs_on_a_gpu == 1
    assert two.gpus == ((0, 1), (2, 3))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert two.environment(1) == {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "2,3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert two.environment(1)["CUDA_VISIBLE_DEVICES"] == "6,7", "of those that this process may use"
    assert Machine(1).environment(0)["CUDA_VISIBLE_DEVICES"] == "", "none where the runs are on CPUs"
    for place, gpus in (("device: gpu", 0), ("jobs: 2, ranks: 2", 3)):
        with pytest.raises(UserError, match=rf"more than the {gpus} GPUs that are visible here"):
            machine(place, gpus)


def test_what_is_left_of_a_run(planned, monkeypatch, capsys):
    experiment, models, folder = planned()
    run = main_runs(experiment, models, {"a": 0.001})[0]
    progress = Progress(folder, [run])

    def chain():
        return RunChain(experiment, folder, "data-bin", run, Machine(1), progress, prefix=0)

    own = folder.run(run.folder)
    assert (own.state()["state"], is_trained(own, 100)) == (WAITING, False)
    first = chain()
    step = first.next_step(0)
    assert step.name == "train" and own.state()["state"] == RUNNING
    assert "--max-update 100" in own.command.read_text()
    log(own, 40, train=5.0)
    own.output.write_text("something\nKeyError: 'x'\n\n")
    first.ended(Ended(step, 1, 9.0, 123.0, 0.0))
    assert first.next_step(0) is None, "a failure ends the chain"
    assert own.state()["state"] == FAILED
    assert own.state()["message"] == "train failed with status 1: KeyError: 'x'"
    own.output.unlink()
    first.ended(Ended(step, 1, 0.0, 1.0, 0.0))
    assert own.state()["message"] == f"train failed with status 1: {own.output} has been removed"
    second = chain()
    second.ended(Ended(second.next_step(0), 75, 1.0, 100.0, 0.0))
    assert own.state()["state"] == STOPPED
    third = chain()
    third.ended(Ended(third.next_step(0), 0, 1.0, 100.0, 0.0))
    assert own.state()["message"].startswith("train failed with status 0"), "the log says 40 of 100 updates"
    third = chain()
    with monkeypatch.context() as lost:
        lost.setattr(local, "updates_of", lambda checkpoint: 100)
        third.ended(Ended(third.next_step(0), 0, 1.0, 100.0, 0.0))
    assert "train.log lacks its end, " in own.state()["message"] and str(own.path) in own.state()["message"]
    third = chain()
    third.ended(Ended(third.next_step(0), 143, 1.0, 100.0, 0.0, is_stopping=True))
    assert own.state()["state"] == STOPPED
    log(own, 100, train=5.0)
    third = chain()
    third.ended(Ended(third.next_step(0), 0, 1.0, 100.0, 0.0))
    assert own.state()["peak_memory_mib"] == 123.0
    assert third.next_step(0).name == "score"
    own.scores.write_text('{"subsets": {"valid": {}}}')
    assert what_is_not_scored(third.experiment, own, 0) == "score"
    own.scores.write_text('{"prefix": 5, "subsets": {"valid": {}}}')
    assert third.next_step(0) is None, "one that comes to nothing is not begun again and again"
    assert own.state()["message"] == "score produced no result, although it ended with status 0"
    assert own.state()["state"] == FAILED
    third = chain()
    assert third.next_step(0).name == "score", "on other positions than those of all models"
    own.scores.write_text('{"prefix": 0, "subsets": {"valid": {}}}')
    log(own, 100, valid=3.0)
    assert third.next_step(0) is None
    assert own.state()["state"] == DONE
    assert [attempt["status"] for attempt in own.state()["attempts"]] == [1, 1, 75, 0, 0, 143, 0]
    assert "a-s1: done in 14 s, validation perplexity 8.00 per token" in capsys.readouterr().out
    assert chain().next_step(0) is None, "nothing is done twice"


def test_a_run_whose_step_ends_well_while_all_is_stopped_can_go_on(planned):
    experiment, models, folder = planned()
    run = main_runs(experiment, models, {"a": 0.001})[0]
    chain = RunChain(experiment, folder, "data-bin", run, Machine(1), Progress(folder, [run]), prefix=0)
    own = folder.run(run.folder)
    step = chain.next_step(0)
    log(own, 100, train=5.0, valid=3.0)
    chain.ended(Ended(step, 0, 10.0, 100.0, 0.0, is_stopping=True))
    state = own.state()
    assert (state["state"], state["trained"], state["attempts"][0]["status"]) == (STOPPED, True, 0)


def test_a_run_on_a_cluster_is_trained_when_its_checkpoint_says_so(tmp_path, monkeypatch):
    run = Folder(tmp_path).run("runs/a-s1")
    log(run, 100, train=5.0, valid=3.0)
    assert not is_trained(run, 100), "the checkpoint is not there yet"
    run.last_checkpoint().write_text("x")
    assert not is_trained(run, 100), "it cannot be read"
    updates = 75
    monkeypatch.setattr(local, "updates_of", lambda checkpoint: updates)
    assert not is_trained(run, 100), "it ended between the last validation and the checkpoint"
    updates = 100
    assert is_trained(run, 100) and not is_trained(run, 101)
    run.update_state(trained=False)
    assert is_trained(run, 100), "it was stopped here before, and went on there"


def test_a_run_of_the_grid_that_its_checkpoint_calls_trained_stays_so_without_it(planned, monkeypatch):
    experiment, models, folder = planned()
    run = tuning_runs(experiment, models)[0]
    own = folder.run(run.folder)
    log(own, 10, valid=3.0)
    own.last_checkpoint().write_text("x")
    own.update_state(trained=False)
    monkeypatch.setattr(local, "updates_of", lambda checkpoint: 10)
    chain = RunChain(experiment, folder, "data-bin", run, Machine(1), Progress(folder, [run]), prefix=0)
    assert chain.next_step(0) is None and own.state()["state"] == DONE
    assert not own.last_checkpoint().exists() and is_trained(own, 10)
    own.update_state(state=RUNNING, trained=False)
    own.last_checkpoint().write_text("x")
    monkeypatch.setattr(chain, "remove_checkpoints", lambda: 1 / 0)  # as if it was killed there
    with pytest.raises(ZeroDivisionError):
        chain.next_step(0)
    own.last_checkpoint().unlink()
    assert is_trained(own, 10) and own.state()["state"] == RUNNING


def test_no_experts_are_kept_of_checkpoints_that_are_not(tmp_path):
    """Of several ranks, a checkpoint's experts are files of their own."""
    run = Folder(tmp_path).run("runs/a-s1")
    run.path.mkdir(parents=True)
    for name in ("checkpoint_best.pt", "checkpoint_last.pt"):
        write_in_parts(open_checkpoint(save(tmp_path, "smlp_tiny")), run.path / name, 2)
    assert len(list(run.path.glob("experts/*"))) == 2
    run.drop_checkpoints(keep_last=True)
    assert len(list(run.path.glob("experts/*"))) == 1
    run.drop_checkpoints(keep_last=False)
    assert not list(run.path.rglob("*.pt"))


def test_a_validation_of_any_subset_is_one(tmp_path):
    run = Folder(tmp_path).run("runs/a-s1")
    log(run, 40, train=5.0, valid=3.0)
    text = run.log.read_text()
    run.log.write_text(text.replace("valid_", "test_") + '{"epoch": 1, "train_loss": "9", "train_num_updates": "40"}\n')
    assert reached(run.log).valid == 8.0 and reached(run.log).updates == 40
    run.log.write_text(text.replace("valid_", "test_") + text.replace('"3.0"', '"4.0"'))
    assert reached(run.log).valid == 16.0, "valid, where there are several"


ZEROSHOT = FILE + "evaluate: {zeroshot: {data: TASKS, tasks: [copa], limit: 3}}\n"


def test_answers_to_other_tasks_are_not_there_yet(planned, tmp_path):
    (tmp_path / "tasks").mkdir()
    text = ZEROSHOT.replace("TASKS", str(tmp_path / "tasks"))

    def begin(text):
        experiment, models, folder = planned(text)
        run = main_runs(experiment, models, {"a": 0.001})[0]
        return RunChain(experiment, folder, "data-bin", run, Machine(1), Progress(folder, [run]), prefix=0)

    chain = begin(text)
    own = chain.folder
    own.update_state(trained=True)
    log(own, 100, valid=3.0)
    own.scores.write_text('{"prefix": 0, "subsets": {"valid": {}}}')
    own.output.write_text("OSError: no tasks\n")
    step = chain.next_step(0)
    assert step.name == "zeroshot" and step.command[step.command.index("--limit") + 1] == "3"
    chain.ended(Ended(step, 1, 1.0, 1.0, 0.0))
    assert chain.next_step(0) is None
    assert own.state()["state"] == DONE, "what was trained and scored stays in the comparison"
    assert own.state()["message"] == "zeroshot failed with status 1: OSError: no tasks"
    chain = begin(text)
    assert what_is_not_scored(chain.experiment, own, 0) == "zeroshot"
    own.update_state(state=WAITING)  # as run_here does
    step = chain.next_step(0)
    own.zeroshot.write_text("{}")
    chain.ended(Ended(step, 0, 1.0, 1.0, 0.0))
    assert chain.next_step(0) is None and own.state()["message"] is None
    assert what_is_not_scored(chain.experiment, own, 0) is None
    for other in (
        text.replace("limit: 3", "limit: 4"),
        text.replace("[copa]", "[copa, piqa]"),
        text.replace("[copa]", "[all]"),
    ):
        assert what_is_not_scored(planned(other)[0], own, 0) == "zeroshot", other
    (tmp_path / "tasks" / "copa").mkdir()
    (tmp_path / "tasks" / "copa" / "val.jsonl").write_text("{}\n")  # the records have changed
    assert what_is_not_scored(chain.experiment, own, 0) == "zeroshot"


def test_changed_answers_of_a_task_are_noticed(planned, tmp_path):
    (tmp_path / "tasks" / "piqa").mkdir(parents=True)
    (tmp_path / "tasks" / "piqa" / "valid.jsonl").write_text("{}\n")
    (answers := tmp_path / "tasks" / "piqa" / "valid-labels.lst").write_text("0\n")
    experiment, models, folder = planned(ZEROSHOT.replace("TASKS", str(tmp_path / "tasks")).replace("copa", "piqa"))
    own = folder.run(main_runs(experiment, models, {"a": 0.001})[0].folder)
    own.scores.parent.mkdir(parents=True, exist_ok=True)
    own.scores.write_text('{"prefix": 0, "subsets": {"valid": {}}}')
    own.zeroshot.write_text("{}")
    own.update_state(zeroshot_of=local._zeroshot_of(experiment))
    assert what_is_not_scored(experiment, own, 0) is None
    answers.write_text("1\n")
    assert what_is_not_scored(experiment, own, 0) == "zeroshot"


def test_positions_are_those_of_all_models_also_where_one_is_not_scored(planned, monkeypatch):
    text = FILE.replace("b: {arch: smlp_tiny}", "b: {arch: smlp_partial_tiny}").replace("tune", "#")
    experiment, models, folder = planned(text + "max_spread: 0.1\n")
    prefixes = []
    monkeypatch.setattr(experiment_run, "run_here", lambda *args: prefixes.append(args[-1]))
    runs = main_runs(experiment, models, {})
    experiment_run._train(experiment, folder, "data-bin", models, runs[:1], Machine(1))
    assert (runs[0].model.name, prefixes) == ("a", [26])


def test_a_dry_run_needs_no_data(planned, tmp_path, monkeypatch, capsys):
    def configuration_of(words, settings):
        arch = words[words.index("--arch") + 1]
        assert int(words[words.index("--max-update") + 1]) > 0, "schedules of the rate are checked against it"
        return SimpleNamespace(optimizer=None, task=None, model=smlp.preset(arch, vocab_size=64, max_tokens=128))

    monkeypatch.setattr("smlp.fairseq_compat.command_line.training_configuration", configuration_of)
    monkeypatch.setattr(
        "smlp.config.presets.config_of", lambda model, vocab_size: replace(model, vocab_size=vocab_size)
    )
    monkeypatch.setattr(dry_run, "measure_update", lambda model, experiment, threads: 0.5)
    path = planned(ZEROSHOT.replace("TASKS", "no/tasks") + "max_spread: 0.1\n")[0].path
    words = ["compare", "run", str(path), "--out", str(tmp_path / "out")]
    assert main([*words, "--dry-run"]) == 1
    assert "data data-bin does not exist: for a dry run without it, set vocab_size" in capsys.readouterr().err
    path.write_text(path.read_text() + "vocab_size: 4000\n")
    assert main([*words, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "smlp train data-bin" in printed and " --lr 0.001 " in printed
    assert "no data yet: 4,000 pieces are assumed" in printed
    size = smlp.costs.formula.flops_per_token(smlp.preset("gmlp_lm_tiny", vocab_size=4000, max_tokens=128))
    assert f"{size / 1e6:.3f}" in printed
    assert "6 runs: about" in printed
    assert not (tmp_path / "out").exists(), "nothing is made"
    path.write_text(path.read_text() + "run: {ranks: 2, device: cpu}\n")
    for name, loss in (("a-0.001", 4.0), ("a-0.002", 3.0), ("b-0.001", 3.0), ("b-0.002", 4.0)):
        own = Folder(tmp_path / "out").run(f"tune/{name}")
        log(own, 10, valid=loss)
        own.update_state(state=DONE)
    assert main([*words, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "smlp train --nproc 2 data-bin" in printed and " --lr 0.002 " in printed, "the grid is done"
    assert main([*words, "--dry-run", "--only", "scores"]) == 1
    assert "--only scores does none: give one of the two" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out")
    assert main(words) == 1
    assert "there is no folder no/tasks" in capsys.readouterr().err


def test_time_left_of_a_run(tmp_path):
    run = Folder(tmp_path).run("runs/a-s1")
    log(run, 40, train=4.0)
    lines = run.log.read_text().replace('"update": 0.5', '"update": 0.5, "ups": "2.5"')
    run.log.write_text(lines)
    run.update_state(state=RUNNING)
    folder = Folder(tmp_path)
    with folder.locked():
        row = progress._status_of(folder, "runs/a-s1", 100, is_over=False)
    assert (row["state"], row["seconds_left"]) == (RUNNING, 24.0)
    assert progress._status_of(folder, "runs/a-s1", 100, is_over=False)["seconds_left"] is None, "it was stopped"


CLUSTER = FILE + "run: {where: slurm, nodes: 1, gpus_per_node: 2}\n"


def test_nothing_is_scored_while_the_grid_is_not_over(planned, monkeypatch):
    """A value would be chosen from a part of it."""
    experiment, models, folder = planned(CLUSTER)
    folder.path.mkdir()
    monkeypatch.setattr(experiment_run, "_prepare", lambda experiment, folder: ("data-bin", models))
    first, *rest = tuning_runs(experiment, models)
    folder.run(first.folder).update_state(state=FAILED)
    with pytest.raises(UserError, match=f"{len(rest)} of {len(rest) + 1} runs of the grid are not over"):
        experiment_run.run_experiment(experiment, folder, only_scores=True)
    assert not folder.tuned.exists()


def test_trained_runs_of_a_grid_choose_what_is_scored(planned, monkeypatch):
    """Jobs of a cluster leave their state open."""
    experiment, models, folder = planned(CLUSTER)
    folder.path.mkdir()
    monkeypatch.setattr(experiment_run, "_prepare", lambda experiment, folder: ("data-bin", models))
    for run in tuning_runs(experiment, models):
        log(folder.run(run.folder), run.updates, valid=3.0 if run.name.endswith("0.002") else 4.0)
        folder.run(run.folder).update_state(state=FAILED, trained=True, message="two jobs failed to train it")
    experiment_run.run_experiment(experiment, folder, only_scores=True)
    assert read_json(folder.tuned)["chosen"] == {"a": 0.002, "b": 0.002}
    assert not any(folder.run(run.folder).state()["message"] for run in tuning_runs(experiment, models))


def test_jobs_that_come_to_nothing_are_submitted_again_but_not_for_ever(planned, monkeypatch, capsys):
    experiment, models, folder = planned(CLUSTER)
    folder.path.mkdir()
    submitted = []

    def refuse(*args, **kw):
        raise UserError("cannot submit: invalid partition")

    def submit(experiment, folder, data, runs, then_score):
        submitted.append(sorted(run.name for run in runs))
        return "job 7"

    monkeypatch.setattr(slurm, "submit", refuse)
    for _ in range(3):
        with pytest.raises(UserError, match="invalid partition"):
            experiment_run._submit(experiment, folder, "data-bin", models)
    monkeypatch.setattr(slurm, "submit", submit)
    grid = sorted(run.name for run in tuning_runs(experiment, models))
    experiment_run._submit(experiment, folder, "data-bin", models)
    log(folder.run("tune/a-0.001"), 4, train=4.0)  # cancelled on its way
    experiment_run._submit(experiment, folder, "data-bin", models)
    experiment_run._submit(experiment, folder, "data-bin", models)
    assert submitted == [grid, grid, [name for name in grid if name.endswith("a-0.001")]]
    capsys.readouterr()
    assert experiment_run._submit(experiment, folder, "data-bin", models) == 1
    printed = capsys.readouterr().out
    assert "not trained: a: every run of its grid failed" in printed and "all runs are trained" not in printed
    assert "two jobs failed to train it" in folder.run("tune/b-0.002").state()["message"]


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ((), "gpu:1"),
        (("--gres=gpu:2",), "gpu:1"),
        (("--gres=gpu:a100:2", "--time=9"), "gpu:a100:1"),
        (("--gres=shard:1,gpu:a100",), "gpu:a100:1"),
        (("--gres=gpu:a100:8", "--gres=gpu:h100:2(S:0)"), "gpu:h100:1"),
    ],
)
def test_scores_take_a_gpu_of_the_type_of_the_training(given, asked):
    """Where a cluster wants a type, it refuses a job without one."""
    assert slurm._gpu(given) == asked


def test_a_grid_with_a_run_that_is_given_up_has_chosen(planned):
    """For a dry run, too, and it does not count that run among those to do."""
    experiment, models, folder = planned(CLUSTER)
    folder.path.mkdir()
    for run in tuning_runs(experiment, models):
        own = folder.run(run.folder)
        if run.name.endswith("0.002"):
            log(own, run.updates, valid=3.0)
            own.update_state(state=DONE, trained=True)
        else:
            jobs, message = ([0, 0], "two jobs failed") if "/a-" in run.folder else ([0], "it has diverged")
            made_with = run.made_with(experiment)
            own.claim(made_with)
            own.update_state(state=FAILED, submitted=jobs, message=message)
            assert progress.is_given_up(own, made_with)
            assert progress.has_diverged(own, made_with) == ("/b-" in run.folder)
            assert not progress.is_given_up(own, {**made_with, "clip_norm": 0.1})  # with which it may not diverge
    assert chosen_so_far(experiment, models, folder) == {"a": 0.002, "b": 0.002}
    grid = tuning_runs(experiment, models)
    here = dataclasses.replace(experiment, resources=dataclasses.replace(experiment.resources, where="local"))
    assert [run.folder for run in dry_run._given_up(here, folder, grid)] == ["tune/b-0.001"]
    assert [run.folder for run in dry_run._given_up(experiment, folder, grid)] == ["tune/a-0.001", "tune/b-0.001"]
    folder.run("tune/a-0.001").update_state(state="waiting")  # its second job is in the queue
    assert [run.folder for run in dry_run._given_up(experiment, folder, grid)] == ["tune/b-0.001"]
    assert chosen_so_far(experiment, models, folder) == {}


def test_scores_that_the_file_asks_for_later_are_a_job_of_the_cluster(planned, monkeypatch, capsys):
    experiment, models, folder = planned(CLUSTER.replace("tune", "#") + "evaluate: {subsets: [valid, test]}\n")
    runs = main_runs(experiment, models, {})
    for run in runs:
        own = folder.run(run.folder)
        own.update_state(state=DONE, trained=True, model=run.model.name, seed=run.seed, message="zeroshot failed")
        write_json(own.scores, {"subsets": {"valid": {}, "test": {}}, "prefix": 0})
    assert experiment_run._submit(experiment, folder, "data-bin", models) == 0
    assert "failed: " not in capsys.readouterr().out, "no tasks are asked for any more"
    write_json(folder.run(runs[1].folder).scores, {"subsets": {"valid": {}}, "prefix": 0})
    monkeypatch.setattr(slurm, "submit_scores", lambda experiment, folder: "77")
    assert experiment_run._submit(experiment, folder, "data-bin", models) == 0
    assert "all runs are trained; job 77 scores them" in capsys.readouterr().out
    assert [folder.run(run.folder).state()["state"] for run in runs] == [DONE, WAITING]


def test_jobs_of_a_cluster_are_all_remembered(planned, monkeypatch):
    experiment, _, folder = planned(CLUSTER)
    monkeypatch.setattr(slurm, "_run", lambda command, environment=None: "12\n")
    assert slurm.submit_scores(experiment, folder) == "12"
    monkeypatch.setattr(slurm, "_run", lambda command, environment=None: "13;cluster\n")
    slurm.submit_scores(experiment, folder)
    assert read_json(folder.path / "slurm" / "jobs.json", list) == ["12", "13;cluster"]
    assert experiment.resources.at_a_time(9) == 9, "no limit where the file has none"


def test_folders_named_like_options_are_paths_for_the_jobs(planned, tmp_path, monkeypatch):
    """The jobs' scripts would take ``--save-dir -out/runs`` and ``score.sbatch -out/experiment.yaml`` for options."""
    experiment, models, _ = planned(CLUSTER)
    monkeypatch.chdir(tmp_path)
    folder, commands = Folder(Path("-out")), []
    monkeypatch.setattr(slurm, "_run", lambda command, environment=None: commands.append(command) or "job 12: 2 runs")
    slurm.submit(experiment, folder, "-data", tuning_runs(experiment, models), then_score=False)
    assert commands[0][-3:] == ["--", "./-data", "./-out/tune"]
    monkeypatch.setattr(slurm, "_run", lambda command, environment=None: commands.append(command) or "13")
    slurm.submit_scores(experiment, folder)
    assert commands[1][-2:] == ["./-out/experiment.yaml", "./-out"]


@pytest.mark.usefixtures("sigint_is_heard")
def test_a_job_is_noted_whatever_sbatch_prints_and_although_a_signal_comes(planned, tmp_path, monkeypatch, capsys):
    """Without its number the next command would submit the same runs again."""
    experiment, _, folder = planned(CLUSTER)
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\nkill -INT $PPID\nprintf '2024: a notice\\n\\377\\n17;cluster \\nbye\\n'\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(KeyboardInterrupt):
        slurm.submit_scores(experiment, folder)
    assert "SIGINT: waiting for sbatch, to note its job" in capsys.readouterr().err
    assert read_json(folder.path / "slurm" / "jobs.json", list) == ["17;cluster"]
    sbatch.write_text("#!/bin/sh\nkill -INT $PPID\necho no such partition >&2\nexit 1\n")
    with pytest.raises(KeyboardInterrupt):
        slurm.submit_scores(experiment, folder)
    sbatch.write_text("#!/bin/sh\necho 18\n")
    with ThreadPoolExecutor() as pool:
        assert pool.submit(slurm.submit_scores, experiment, folder).result() == "18"


def test_jobs_of_another_cluster_are_asked_for_there(planned, tmp_path, monkeypatch):
    """squeue knows the jobs of one's own cluster only, and calls the others invalid."""
    experiment, _, folder = planned(CLUSTER.replace("gpus_per_node: 2", "gpus_per_node: 2, sbatch: ['--clusters=b,c']"))
    commands = []
    monkeypatch.setattr(slurm, "_run", lambda command, environment=None: commands.append(command) or "13;c\n")
    slurm.submit_scores(experiment, folder, after="12;c")
    assert [word for word in commands[0] if word.startswith(("--dep", "--clu"))] == [
        *("--clusters=b,c", "--dependency=afterany:12", "--clusters=c")
    ]
    monkeypatch.setattr(slurm, "_run", lambda command, environment=None: "Submitted batch job 14 on cluster b\n")
    assert slurm.submit_scores(experiment, folder) == "14 of cluster b"
    monkeypatch.setattr(slurm, "_run", lambda command, environment=None: "15;\n")
    assert slurm.submit_scores(experiment, folder) == "15"
    monkeypatch.setattr(slurm, "_run", lambda command, environment=None: "14\n")
    slurm.submit_scores(experiment, folder)
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(
        '#!/bin/sh\n[ -z "$SQUEUE_STATES" ] || exit 0\n'
        'case "$*" in\n--clusters=c*) echo CLUSTER: c; echo 13;;\n--clusters=b*) echo CLUSTER: b;;\n'
        "*) echo slurm_load_jobs error: Invalid job id specified >&2; exit 1;;\nesac\n"
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")  # what a user wants to see is not what there is
    assert slurm.jobs_in_queue(folder) == ["13 of cluster c"]
    squeue.write_text("#!/bin/sh\necho no answer >&2; exit 1\n")
    with pytest.raises(UserError, match=r"^cannot ask Slurm for the jobs 13 of cluster c: no answer$"):
        slurm.jobs_in_queue(folder)


@pytest.mark.parametrize(
    "content", ['["101", null]', "[101]", '["--version"]', "{}", '["1,2"]', '["1;a b"]', '["1;--help"]']
)
def test_damaged_numbers_of_jobs_are_not_given_to_slurm(planned, content):
    _, _, folder = planned(CLUSTER)
    (folder.path / "slurm").mkdir(parents=True)
    (folder.path / "slurm" / "jobs.json").write_text(content)
    with pytest.raises(UserError, match=r"jobs.json is damaged"):
        slurm.jobs_in_queue(folder)
    (folder.path / "slurm" / "jobs.json").write_text("[]")
    assert slurm.jobs_in_queue(folder) == []


def test_a_job_whose_scoring_job_is_refused_is_named(planned, monkeypatch):
    experiment, models, folder = planned(CLUSTER)

    def run(command, environment=None):
        if command[0] == "sbatch":
            raise UserError("cannot submit: too many jobs")
        return "job 41: 2 ranks"

    monkeypatch.setattr(slurm, "_run", run)
    with pytest.raises(UserError, match=r"job 41 trains the runs; the job that scores them is missing: .* too many"):
        slurm.submit(experiment, folder, "data-bin", main_runs(experiment, models, {"a": 1, "b": 1}), then_score=True)


def test_jobs_of_a_cluster_have_cores_for_their_threads(planned, monkeypatch):
    own = "gpus_per_node: 2, threads: 3, sbatch: [--cpus-per-task=4]"
    experiment, models, folder = planned(CLUSTER.replace("gpus_per_node: 2", own))
    commands = []
    monkeypatch.setattr(
        slurm, "_run", lambda command, environment=None: commands.append(command) or "12\njob 12: 2 ranks"
    )
    slurm.submit(experiment, folder, "data-bin", tuning_runs(experiment, models), then_score=True)
    given = [[word for word in command if "cpus" in word] for command in commands]
    assert given == [["--cpus-per-task=3", "--cpus-per-task=4"]] * 2, "the last one counts"


def test_the_scoring_job_waits_for_the_training_whatever_that_waits_for(planned, monkeypatch):
    text = CLUSTER.replace("gpus_per_node: 2", "gpus_per_node: 2, sbatch: [--dependency=afterok:5]")
    experiment, models, folder = planned(text)
    commands = []
    monkeypatch.setattr(
        slurm, "_run", lambda command, environment=None: commands.append(command) or "12\njob 12: 2 ranks"
    )
    slurm.submit(experiment, folder, "data-bin", tuning_runs(experiment, models), then_score=True)
    last = [[word for word in command if word.startswith("--dependency")][-1] for command in commands]
    assert last == ["--dependency=afterok:5", "--dependency=afterany:12"]


@pytest.mark.parametrize("option", ["--array=1", "--arr=1", "-a1", "--output=x.out", "-o"])
def test_options_of_sbatch_that_the_command_needs_itself_are_refused(planned, option):
    with pytest.raises(UserError, match=f"sbatch has {option}, which smlp compare sets itself"):
        planned(CLUSTER.replace("gpus_per_node: 2", f"gpus_per_node: 2, sbatch: [{option}]"))


@pytest.mark.parametrize(
    ("queue", "states"),
    [
        (["7"], ["trained", RUNNING, WAITING]),
        ([], ["trained", STOPPED, STOPPED]),
        (None, ["trained", RUNNING, WAITING]),
    ],
)
def test_a_job_that_has_ended_is_not_shown_as_running(planned, monkeypatch, capsys, queue, states):
    text = FILE.replace("  b:", "  c: {arch: gmlp_lm_tiny}\n  b:") + "run: {where: slurm, nodes: 1, gpus_per_node: 1}\n"
    experiment, models, folder = planned(text.replace("tune", "#"))
    for run, updates in zip(main_runs(experiment, models, {}), (100, 40, 0), strict=True):
        own = folder.run(run.folder)
        own.update_state(model=run.model.name, submitted=[0])
        log(own, updates, train=4.0)
    write_json(folder.experiment, as_json(experiment, models))
    folder.yaml.write_text(experiment.path.read_text())

    def jobs_in_queue(folder):
        if queue is None:
            raise UserError("cannot ask Slurm")
        return queue

    monkeypatch.setattr(slurm, "jobs_in_queue", jobs_in_queue)
    assert main(["compare", "status", str(folder.path)]) == 1
    lines = capsys.readouterr().out.splitlines()[1:4]
    assert [line.split()[1] for line in lines] == states
    assert [str(folder.path / "slurm" / "logs") in line for line in lines] == [state == STOPPED for state in states]


def test_progress_says_how_long_it_takes(planned, capsys):
    experiment, models, folder = planned()
    runs = main_runs(experiment, models, {"a": 0.001, "b": 0.001})
    log(folder.run(runs[0].folder), 20, train=5.0)
    progress = Progress(folder, runs)
    assert (progress.total, progress.first) == (200, 20)
    folder.run(runs[0].folder).update_state(state=RUNNING)
    line = progress.line(120, progress.start + 50)
    assert line == "120 of 200 updates (60%), 0 of 2 runs done, 2.0 updates/s, 40 s left: a-s1"
    capsys.readouterr()
    progress.live = True
    progress.watch()
    progress.say("a-s1: done")
    progress._last_look = 0.0
    progress.watch()
    progress.end()
    progress.end()
    first, second, last = capsys.readouterr().out.split("\n")
    drawn = [part.removeprefix("\x1b[K") for part in (*first.split("\r"), *second.split("\r"))]  # each erases the line
    assert not last and drawn[0] == drawn[3] == "" and drawn[2] == "a-s1: done"
    assert all(part.startswith("20 of 200 updates") for part in (drawn[1], drawn[4])) and first.count("\x1b[K") == 2
    assert [duration(seconds) for seconds in (89, 1200, 7260, 400_000)] == ["89 s", "20 min", "2 h 01 min", "4.6 days"]


def test_scores_in_16_bits_agree_less_closely(tmp_path):
    run = Folder(tmp_path).run("runs/a-s1")
    log(run, 8, valid=3.0)
    nll = 3.0 * math.log(2) + 0.01
    check_agreement(run, "valid", 8, nll, HALF_AGREEMENT)
    with pytest.raises(UserError, match=r"2\.0894 nats per token on valid, but .* after update 8, gave 2\.0794"):
        check_agreement(run, "valid", 8, nll, AGREEMENT)
    run.log.write_text(run.log.read_text().replace("valid_", "held-out_"))
    with pytest.raises(UserError, match="on held-out, but the last validation"):
        check_agreement(run, "held-out", 8, nll, AGREEMENT)


def test_a_run_that_diverged_is_scored_all_the_same(tmp_path):
    run = Folder(tmp_path).run("runs/a-s1")
    log(run, 8, valid=math.nan)
    check_agreement(run, "valid", 8, math.nan, AGREEMENT)
    log(run, 8, valid=3.0)
    check_agreement(run, "valid", 16, 900.0, AGREEMENT)  # the validation of update 16 has no point


def test_a_command_is_repeated_by_a_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SMLP_REFERENCE_OPS", "1")
    run = Folder(tmp_path / "out").run("runs/a")
    shown = "import os; print(os.getcwd(), os.environ['SMLP_REFERENCE_OPS'], os.environ['OMP_NUM_THREADS'])"
    run.write_command([sys.executable, "-c", shown], {"OMP_NUM_THREADS": "3"})
    done = subprocess.run(
        ["bash", str(run.command)],
        cwd="/",
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == f"{tmp_path} 1 3\n", done.stderr


def test_what_a_changed_clone_differs_by_is_kept(tmp_path, monkeypatch):
    clone, out = tmp_path / "clone", tmp_path / "out"
    (clone / "smlp").mkdir(parents=True)
    out.mkdir()
    (clone / "smlp" / "one.py").write_text("before\n \n\n")
    (clone / "smlp" / "two.txt").write_bytes(b"caf\xe9\r\n")  # no UTF-8, and line ends of Windows
    (clone / "smlp" / "three.bin").write_bytes(bytes(range(256)))
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", str(clone), *words], check=True, timeout=60)
    monkeypatch.setattr(smlp, "__path__", [str(clone / "smlp")])
    keep_difference(git_revision(clone), out)
    assert not list(out.iterdir())
    (clone / "smlp" / "one.py").write_text("after\n \n\n")
    (clone / "smlp" / "two.txt").write_bytes(b"caf\xe9s\r\n")
    (clone / "smlp" / "three.bin").write_bytes(bytes(range(255, -1, -1)))
    found = git_revision(clone)
    settings = {"color.ui": "always", "diff.noprefix": "true", "diff.external": "true"}
    for number, (name, value) in enumerate(settings.items()):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", name)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", value)
    monkeypatch.setenv("GIT_CONFIG_COUNT", str(len(settings)))
    assert git_revision(clone) == found
    keep_difference(found, out)
    (patch,) = out.iterdir()
    assert patch.name == f"changes-{found['difference_sha256'][:12]}.patch"
    assert b"-before\n+after\n" in patch.read_bytes()
    subprocess.run(["git", "-C", str(clone), "checkout", "-q", "."], check=True, timeout=60)
    subprocess.run(["git", "-C", str(clone), "apply", str(patch)], check=True, timeout=60)
    assert git_revision(clone) == found
