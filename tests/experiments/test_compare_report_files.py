"""Reports of folders with runs that failed, are missing or half done; and the report's files."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from pathlib import Path

import experiment_folder as folder
import pytest
from experiment_folder import MODELS, SEEDS, cell, rewrite, run_folder, tables, training_line, write_experiment

from smlp.cli.main import main
from smlp.errors import UserError
from smlp.evaluation.curves import log_record
from smlp.experiments.progress import reached
from smlp.experiments.report.details import incomplete
from smlp.experiments.report.machine import describe_machine, differences
from smlp.experiments.report.paper import scale_sentences
from smlp.experiments.report.results import read_results
from smlp.experiments.report.timeline import missing_update, read_timeline, training_lines
from smlp.experiments.report.write import write_report

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def out(tmp_path) -> Path:
    return write_experiment(tmp_path)


def damage(out: Path) -> None:
    """A run that failed, one that was never started, one that is half done, and one whose scores are lost."""
    rewrite(run_folder(out, "sMLP", 1) / "run.json", state="failed", message="RuntimeError: no more memory")
    shutil.rmtree(run_folder(out, "sMLP", 2))
    half = run_folder(out, "Switch", 3)
    rewrite(half / "run.json", state="running")
    text = (half / "train.log").read_text()
    (half / "train.log").write_text(text[: text.index('"valid_num_updates": "30"') - 30])  # in the midst of a line
    order = (half / "data_order.jsonl").read_text().splitlines()[:33]
    (half / "data_order.jsonl").write_text("\n".join([*order, '{"update": 34, "dig']))
    (half / "scores.json").unlink()
    (run_folder(out, "gMLP", 2) / "scores.json").write_text('{"subsets": ')


def test_scores_of_other_positions_are_left_out_and_named(out):
    """As after a model with a prefix was added, until all are scored again."""
    rewrite(run_folder(out, "gMLP", 2) / "scores.json", prefix=3)
    ((run, reason),) = incomplete(read_results(out))
    assert run.name == "gMLP-s2" and reason.startswith("scores.json is left out: its prefix is 3, not ")
    assert 2 not in cell(tables(out)["quality-valid"], "sMLP", "against_gMLP").samples


def test_runs_that_are_not_whole_are_named_and_the_others_reported(out):
    damage(out)
    found = {run.name: (run.last_update, reason) for run, reason in incomplete(read_results(out))}
    assert found == {
        "sMLP-s1": (40, "RuntimeError: no more memory"),
        "sMLP-s2": (0, "it was never started: its folder does not exist"),
        "Switch-s3": (
            33,
            "it had not finished when the report was made, or was killed; "
            "data_order.jsonl: 1 of 34 lines are damaged and left out",
        ),
        "gMLP-s2": (40, "scores.json is damaged: it is not JSON (Expecting value: line 1 column 13 (char 12))"),
    }
    quality = tables(out)["quality-valid"]
    assert cell(quality, "sMLP", "per_token").samples == {3: pytest.approx(2 ** (4 - 0.2 + 0.03))}
    assert list(cell(quality, "Switch", "against_gMLP").samples) == [1]
    assert "seeds" in [column.key for column in tables(out)["summary"].columns]


def test_a_model_whose_grid_failed_is_not_called_forgotten(out):
    shutil.rmtree(run_folder(out, "Switch", 2))
    grid = {"option": "lr", "values": [0.01], "updates": 4, "seed": 1, "results": {"Switch": {"0.01": None}}}
    (out / "tuned.json").write_text(json.dumps({**grid, "chosen": {}}))
    ((_, reason),) = incomplete(read_results(out))
    assert reason == "every run of its grid failed: the run.json of each, in tune/, has the reason"


def test_a_step_that_failed_after_the_training_is_named(out):
    rewrite(run_folder(out, "Switch", 2) / "run.json", message="zeroshot failed with status 1: OSError: no tasks")
    assert [reason for _, reason in incomplete(read_results(out))] == [
        "zeroshot failed with status 1: OSError: no tasks"
    ]


@pytest.mark.parametrize(
    ("trained", "last", "words"),
    [
        (True, 0, "it is trained, and waits for its scores"),
        (None, folder.UPDATES, "it is trained, and waits for its scores"),
        (None, 20, "it had not finished when the report was made"),
        (None, 0, "it has not been started"),
    ],
)
def test_a_run_that_waits_is_not_called_unstarted(out, trained, last, words):
    """A run of this machine says that it waits for more scores; on a cluster, only the log tells how far a run is."""
    run = run_folder(out, "Switch", 2)
    rewrite(run / "run.json", state="waiting", trained=trained)
    (run / "train.log").write_text("".join(f"{line}\n" for line in folder.log_lines("Switch", 2, last)))
    (run / "data_order.jsonl").unlink()
    ((_, reason),) = incomplete(read_results(out))
    assert reason.startswith(words)


def test_a_margin_beyond_all_numbers(out):
    """Two seeds, of which one ended at e^160: the interval's end is no number any more."""
    rewrite(out / "experiment.json", seeds=SEEDS[:2])
    scores = run_folder(out, "gMLP", SEEDS[0]) / "scores.json"
    rewrite(scores, subsets={"valid": {"nll_all": 160.0, "nll_after_prefix": 160.0, "tokens": 1000}})
    found = cell(tables(out)["quality-valid"], "sMLP", "against_gMLP")
    assert found.high == pytest.approx(100 * math.expm1(700)) and found.text.endswith(", +1e+306]")


def test_a_log_that_says_nothing_is_named(out):
    (run_folder(out, "gMLP", 2) / "train.log").write_text("x\n")
    (run_folder(out, "gMLP", 2) / "update_times.jsonl").unlink()
    found = {run.name: reason for run, reason in incomplete(read_results(out))}
    assert found == {"gMLP-s2": "neither update_times.jsonl nor train.log says how long it trained"}


def test_records_of_routers_and_of_tuning_that_are_lost_are_named(out):
    assert not any("router_health" in note for note in tables(out)["work"].notes)
    (run_folder(out, "Switch", 2) / "router_health.jsonl").write_text("")
    (run_folder(out, "Switch", 3) / "router_health.jsonl").unlink()
    found = "Switch-s2, Switch-s3: router_health.jsonl has no records, so the means are over the other seeds."
    assert tables(out)["work"].notes[-1] == found
    rewrite(out / "experiment.json", tuned_option="lr")
    assert read_results(out).notes == ("tuned.json is missing: the tables do not show the lr that was chosen",)


def test_a_log_that_was_cut_is_named(out):
    log = run_folder(out, "gMLP", 2) / "train.log"
    text = log.read_text()
    log.write_text(text[: text.index('"valid_num_updates": "30"')])
    found = {run.name: reason for run, reason in incomplete(read_results(out))}
    assert list(found) == ["gMLP-s2"] and re.fullmatch(r"train.log ends at update \d\d of 40", found["gMLP-s2"])


def test_a_log_that_cannot_be_read_is_named(out, monkeypatch):
    lost = run_folder(out, "gMLP", 2) / "train.log"

    def refuse(path: Path) -> bytes:
        if path == lost:
            raise PermissionError(13, "Permission denied")
        return path.read_bytes()

    monkeypatch.setattr("smlp.evaluation.curves.read_bytes", refuse)
    found = {run.name: reason for run, reason in incomplete(read_results(out))}
    assert list(found) == ["gMLP-s2"] and f"{lost} cannot be read: Permission denied" in found["gMLP-s2"]


def test_nothing_done_yet(out):
    shutil.rmtree(out / "runs")
    found = tables(out)
    assert len(found["not-whole"].rows) == 12
    assert cell(found["quality-valid"], "gMLP", "seeds").value == 0


def test_a_run_without_times_counts_the_whole_seconds_of_its_log():
    """Of an older version; stopped after update 15, resumed from a checkpoint at 10, in a log with a line cut short."""
    lines = [training_line("sMLP", 1, update) for update in (5, 10, 15)]
    again = [training_line("sMLP", 1, 15, train_wall="9"), training_line("sMLP", 1, 20)]
    timeline = read_timeline([], training_lines([*lines, {}, *again]))
    assert timeline.updates == (0, 5, 10, 15, 20)
    assert timeline.seconds == (0, 4, 8, 17, 21)
    assert timeline.at(12.5) == 12.5 and timeline.mean_tokens == 1024
    assert timeline.at(25) == 21 * 25 / 20
    assert read_timeline([], training_lines([{}, {"valid_loss": "3"}])) is None


def test_times_of_updates_are_exact_and_count_once():
    times = [{"update": update, "tokens": 100 * update, "seconds": 0.25 * update} for update in (1, 2, 3)]
    again = {"update": 3, "tokens": 0, "seconds": 1.0}
    logged = training_lines([training_line("sMLP", 1, 5)])
    timeline = read_timeline([*times, again], logged)
    assert timeline.updates == (0, 1, 2, 3) and timeline.seconds == (0, 0.25, 0.75, 1.75)
    assert timeline.mean_tokens == 100
    # a part of them says nothing about the whole run
    assert read_timeline(times[1:], logged).updates == (0, 5)
    assert read_timeline([times[0], times[2]], {}) is None
    assert missing_update([]) is missing_update(times) is missing_update([*times, again]) is None
    assert (missing_update(times[1:]), missing_update([times[0], times[2]])) == (1, 2)
    assert missing_update([], last=4) is missing_update(times, last=3) is None and missing_update(times, last=5) == 4
    assert read_timeline(times, logged, last=5).updates == (0, 5)


def test_a_run_without_its_last_validation_says_so(out):
    path = run_folder(out, "gMLP", 1) / "train.log"
    text = path.read_text()
    for kept, said in ((text, False), (text.replace('"valid_num_updates": "40"', '"valid_num_updates": "39"'), True)):
        path.write_text(kept)
        (run,) = (run for run in read_results(out).runs if run.folder == path.parent)
        assert ("train.log has no validation on valid at the last update" in run.notes) == said


def test_a_run_with_a_line_missing_from_its_times_says_so(out):
    path = out / "runs" / "gMLP-s1" / "update_times.jsonl"
    lines = [json.dumps({"update": update, "tokens": 8, "seconds": 0.5}) for update in (1, 2, 3)]
    for kept, said in ((lines, False), (lines[:1] + lines[2:], True)):
        path.write_text("\n".join(kept))
        (run,) = (run for run in read_results(out).runs if run.folder == path.parent)
        assert ("update_times.jsonl has no line of update 2" in "".join(run.notes)) == said


def test_a_run_with_a_line_missing_from_its_data_order_says_so(out):
    path = out / "runs" / "gMLP-s1" / "data_order.jsonl"
    lines = path.read_text().splitlines()
    for kept, said in ((lines, False), (lines[:6] + lines[7:], True), (lines[:-1], True)):
        path.write_text("\n".join(kept))
        (run,) = (run for run in read_results(out).runs if run.folder == path.parent)
        assert ("data_order.jsonl has no line of update" in "".join(run.notes)) == said


def test_files_that_leave_out_what_they_may(out):
    (out / "data.json").write_text(json.dumps({"splits": {"train": None, "valid": {"tokens": None}}}))
    (out / "speed.json").write_text(json.dumps({"models": {}, "environment": None}))
    (run_folder(out, "gMLP", 1) / "environment.jsonl").write_text(json.dumps({"gpu": "H200"}) + "\n")
    page = write_report(read_results(out)).read_text()
    assert "- train: 0 tokens" in page and "1 GPU (H200)" in page


def test_lines_of_updates_that_the_run_does_not_have(out):
    """Of a longer run, or damaged; a loss so low that its perplexity is 0 is no point either."""
    path = run_folder(out, "gMLP", 1) / "train.log"
    before = next(run for run in read_results(out).runs if run.folder == path.parent)
    more = [{"num_updates": "500"}, {"num_updates": "-7"}, {"num_updates": "9" * 24}, {"num_updates": "10"}]
    lines = [{"epoch": 1, "loss": "9", "wpb": "128", "train_wall": "40", **line} for line in more[:3]]
    lines += [{"epoch": 1, "valid_loss": "-1100", "valid_num_updates": "10"}]
    path.write_text(path.read_text() + "".join(f"{json.dumps(line)}\n" for line in lines))
    after = next(run for run in read_results(out).runs if run.folder == path.parent)
    assert after.notes == ("3 lines of train.log do not count: their updates are not from 0 to 40",)
    assert (after.curve, after.lines) == (before.curve, before.lines)


def test_a_run_of_another_model_says_so(out):
    path = run_folder(out, "gMLP", 1) / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "made_with": {"arch": "smlp_tiny", "seed": 1}}))
    (run,) = (run for run in read_results(out).runs if run.folder == path.parent)
    assert "run.json is that of another run: arch = smlp_tiny, not gmlp_lm_tiny" in run.notes
    path.write_text(json.dumps({**record, "model": "BASE"}))
    (run,) = (run for run in read_results(out).runs if run.folder == path.parent)
    assert "run.json is that of another run: model = BASE, not gMLP" in run.notes


def test_what_is_no_experiment_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"experiment\.json cannot be read \(No such file.*smlp compare run"):
        read_results(tmp_path)
    (tmp_path / "experiment.json").write_text('{"models": [], "seeds": [1], "updates": 3}')
    with pytest.raises(UserError, match="is damaged: models is empty"):
        read_results(tmp_path)


KEPT = ("experiment", "data", "environment", "tuned", "speed", "runs/gMLP-s1/run", "runs/gMLP-s1/scores")
DAMAGE = (
    "",
    "null",
    "[]",
    "5",
    "{}",
    "[" * 20_000,
    '{"a": ' + "9" * 5000 + "}",
    '{"models": [5], "state": [], "splits": 5, "git": 5}',
)


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_file_that_holds_something_else_is_named(tmp_path, name, capsys):
    """By the report in a sentence or in a note, by the status in a sentence, never by a traceback."""
    whole = write_experiment(tmp_path / "whole", {name: MODELS[name] for name in ("gMLP", "Switch")}, seeds=[1])
    (whole / "experiment.yaml").write_text("data: d\nupdates: 3\nmodels: {gMLP: {arch: gmlp_lm_tiny}}\n")
    for number, content in enumerate(DAMAGE):
        out = tmp_path / str(number)
        shutil.copytree(whole, out)
        (out / f"{name}.json").write_text(content)
        notes = []
        try:
            results = read_results(out)
            list(tables(out))
            notes = [*results.notes, *(note for run in results.runs for note in run.notes)]
        except UserError as error:
            notes = [str(error)]
        expected = content != "{}" or name in ("experiment", "data", "tuned", "speed")
        assert any(Path(name).name + ".json" in note for note in notes) or not expected, (content[:9], notes)
        status = main(["compare", "status", str(out)])
        error = capsys.readouterr().err
        assert status == 1 or name not in ("experiment", "runs/gMLP-s1/run")
        assert error.count("\n") == (name in ("experiment", "runs/gMLP-s1/run")) and "Traceback" not in error


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("experiment.json", lambda e: e["models"][0].update(folder="\0"), "models[0].folder is not a folder name"),
        (
            "experiment.json",
            lambda e: e["models"][0].update(folder="\ud800"),
            "models[0].folder is not a folder name",
        ),
        ("experiment.json", lambda e: e["models"][0].update(folder="../x"), "models[0].folder is not a folder name"),
        (
            "experiment.json",
            lambda e: e["models"][1].update(folder="x" * 300),
            "models[1].folder is not a folder name",
        ),
        (
            "experiment.json",
            lambda e: e["models"][0].update(flops_per_token=0),
            "models[0].flops_per_token must be above 0, got 0",
        ),
        ("experiment.json", lambda e: e.update(updates=0), "updates must be at least 1, got 0"),
        ("experiment.json", lambda e: e.update(targets=[-1]), "targets[0] must be above 0, got -1"),
        (
            "experiment.json",
            lambda e: e.update(evaluation_subsets=["../valid"]),
            "evaluation_subsets[0] is not a folder name",
        ),
        (
            "experiment.json",
            lambda e: e["models"][0].update(parameters={}),
            "models[0].parameters.total must be a number",
        ),
        (
            "experiment.json",
            lambda e: e["models"][0]["config"].update(dropout="x" * 5000),
            "is not an experiment: dropout",
        ),
        ("experiment.json", lambda e: e["models"][0].update(overrides=None, recipe=None), ""),
        (
            "data.json",
            lambda d: d["splits"]["valid"].update(words_per_token=math.nan),
            "words_per_token is out of range",
        ),
        ("data.json", lambda d: d["splits"]["valid"].update(words_per_token=1e308), "words_per_token is out of range"),
        ("data.json", lambda d: d.update(vocab_size="512"), "data.json is damaged: vocab_size must be a whole number"),
        ("tuned.json", lambda t: t["results"]["Switch"].update(a="x"), "results.Switch.a must be a number"),
        ("tuned.json", lambda t: t["results"]["Switch"].update(a=math.inf), "it has a number that is infinite"),
        ("tuned.json", lambda t: t["results"]["Switch"].update(a=1e300), ""),
        ("environment.json", lambda e: e.update(mfu=[math.nan]), "it has a number that is infinite or not-a-number"),
        ("environment.json", lambda e: e.update(processor=5), "environment.json is damaged: processor must be text"),
        ("runs/Switch-s1/environment.jsonl", lambda line: line.update(world_size="2"), "1 of 1 lines are damaged"),
        ("runs/Switch-s1/environment.jsonl", lambda line: line.update(world_size=None), ""),
        ("runs/Switch-s1/zeroshot.json", lambda z: z.update(tasks=None), "zeroshot.json is damaged: tasks must be"),
        ("runs/Switch-s1/zeroshot.json", lambda z: z["tasks"]["copa"].pop("n"), "tasks.copa.n must be a whole number"),
        ("runs/Switch-s1/router_health.jsonl", lambda line: line.update(work=5), "1 of 4 lines are damaged"),
        ("runs/Switch-s1/router_health.jsonl", lambda line: line.update(pooled=[None]), "1 of 4 lines are damaged"),
        ("runs/Switch-s1/router_health.jsonl", lambda line: line.update(tokens="x"), "1 of 4 lines are damaged"),
        ("runs/Switch-s1/router_health.jsonl", lambda line: line["work"].update(ratio="x"), "1 of 4 lines are damaged"),
        ("runs/Switch-s1/router_health.jsonl", lambda line: line.pop("update"), "1 of 4 lines are damaged"),
        ("runs/Switch-s1/router_health.jsonl", lambda line: line.update(work=None, pooled=None, layers=None), ""),
        (
            "runs/Switch-s1/train.log",
            lambda line: line.update(mem_gb="x"),
            "train.log has no validation on valid at the last update",
        ),
        ("runs/Switch-s1/update_times.jsonl", lambda line: line.update(seconds=-1), "lines are damaged"),
        ("runs/Switch-s1/update_times.jsonl", lambda line: line.update(tokens=-5), "lines are damaged"),
        (
            "runs/Switch-s1/train.log",
            lambda line: line.update(train_wall=True),
            "train.log has no validation on valid at the last update",
        ),
    ],
)
def test_single_values_that_are_damaged_are_named(tmp_path, name, change, words, capsys):
    out = write_experiment(tmp_path, {name: MODELS[name] for name in ("gMLP", "Switch")}, seeds=[1])
    (out / "experiment.yaml").write_text("data: d\nupdates: 3\nmodels: {gMLP: {arch: gmlp_lm_tiny}}\n")
    (out / "runs/Switch-s1/environment.jsonl").write_text('{"gpu": "NVIDIA H200", "world_size": 2}\n')
    (out / "runs/Switch-s1/zeroshot.json").write_text('{"tasks": {"copa": {"accuracy": 0.5, "n": 2}}}\n')
    grid = {"option": "--x", "values": ["a"], "results": {"Switch": {"a": 3.0}}, "chosen": {"Switch": "a"}}
    (out / "tuned.json").write_text(json.dumps({**grid, "updates": 4, "seed": 1}))
    path = out / name
    lines = path.read_text().splitlines()
    record = json.loads(lines[-1])
    change(record)
    path.write_text("\n".join([*lines[:-1], json.dumps(record)]) + "\n")
    try:
        results = read_results(out)
        list(tables(out))
        describe_machine(results)
        said = "; ".join([*results.notes, *(note for run in results.runs for note in run.notes)])
    except UserError as error:
        said = str(error)
        assert name in said and len(said) < 400
    assert words in said and (words or not said), said
    status = main(["compare", "status", str(out)])
    error = capsys.readouterr().err
    is_of_plan = words.startswith(("models[", "updates", "targets", "evaluation_subsets"))
    assert error.count("\n") == is_of_plan and (status == 1 or not error) and "Traceback" not in error


@pytest.mark.parametrize(
    ("seconds", "words"),
    [([0.1, 0], "[1] must be above 0, got 0"), ([math.nan], "[0] is out of"), (None, " must be a list")],
)
def test_a_time_of_no_length_in_speed_json_is_named(out, seconds, words):
    (out / "speed.json").write_text(
        json.dumps({"models": {"gMLP": {"tokens_per_update": 1024, "seconds_per_update": seconds}}})
    )
    results = read_results(out)
    list(tables(out))
    assert any(f"speed.json is damaged: models.gMLP.seconds_per_update{words}" in note for note in results.notes)


def test_a_file_or_a_loop_where_a_runs_folder_should_be(out, capsys):
    (out / "experiment.yaml").write_text("data: d\nupdates: 3\nmodels: {gMLP: {arch: gmlp_lm_tiny}}\n")
    for number in (1, 2):
        shutil.rmtree(run_folder(out, "gMLP", number))
    run_folder(out, "gMLP", 1).write_text("no folder")
    run_folder(out, "gMLP", 2).symlink_to("gMLP-s2")
    assert [run.name for run in read_results(out).runs if run.state != "done"] == ["gMLP-s1", "gMLP-s2"]
    assert tables(out)
    assert main(["compare", "status", str(out)]) == 1 and "2 waiting" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    ['{"num_updates": "x", "update": 1, "loss": "3"}', '{"num_updates": 5, "update": 1, "loss": []}', "[]",
     '{"valid_num_updates": 1e999, "valid_loss": "3"}', '{"valid_num_updates": "' + "9" * 5000 + '"}', "{" * 9000],
)  # fmt: skip
def test_a_line_of_a_log_with_no_numbers_is_none(out, line):
    before = read_results(out).runs[0].curve
    log = run_folder(out, "gMLP", 1) / "train.log"
    log.write_text(log.read_text() + line + "\n" + '{"num_updates": 40, "update": 1}\n')
    assert log_record(line) == {}
    assert read_results(out).runs[0].curve == before and reached(log).updates == 40


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The report of an experiment that has something for every figure, with runs missing."""
    pytest.importorskip("matplotlib")
    models = {**MODELS, "gMLP h=4": ("gmlp_lm", "gmlp_lm_tiny", {"num_heads": 4}, 0.1, 0.5)}
    models["gMLP-MoE | a"] = ("gmlp_moe", "gmlp_moe_tiny", {}, 0.2, 0.6)
    out = tmp_path_factory.mktemp("written") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "MODELS", models)
        write_experiment(out, models)
        damage(out)
    assert main(["compare", "report", str(out), "--to", str(out / "there")]) == 0
    return out / "there"


@pytest.mark.parametrize(("bits", "nats"), [("1500", 1040.0), ("NaN", math.nan)])
def test_runs_that_diverged_are_named_and_the_others_reported(out, bits, nats, capsys):
    """One seed of gMLP, and all of Switch."""
    for model, seeds in (("gMLP", SEEDS[1:2]), ("Switch", SEEDS)):
        for seed in seeds:
            run = run_folder(out, model, seed)
            lines = [json.loads(line) for line in (run / "train.log").read_text().splitlines()[1:]]
            late = [{**line, "valid_loss": bits} if "valid_num_updates" in line else line for line in lines]
            (run / "train.log").write_text("".join(f"{json.dumps(line)}\n" for line in late))
            scores = json.loads((run / "scores.json").read_text())
            scores["subsets"]["valid"] |= {"nll_all": nats} | ({} if seed == SEEDS[2] else {"nll_after_prefix": nats})
            (run / "scores.json").write_text(json.dumps(scores))
    found = {run.name: reason for run, reason in incomplete(read_results(out))}
    assert set(found) == {"gMLP-s2", "Switch-s1", "Switch-s2", "Switch-s3"}
    assert found["gMLP-s2"].startswith("it diverged: its loss on valid is ")
    quality = tables(out)["quality-valid"]
    assert set(cell(quality, "gMLP", "per_token").samples) == {1, 3}
    assert cell(quality, "Switch", "per_token").text == "–"
    assert set(cell(quality, "sMLP", "against_gMLP").samples) == {1, 3}
    assert main(["compare", "report", str(out)]) == 0
    page = (out / "report" / "report.md").read_text()
    assert "**Finished, but diverged, failed in a later step, or with files missing or damaged: gMLP-s2, Sw" in page
    words = re.findall(r"\w+", re.sub("valid is nan nats", "", page))
    assert "inf" not in words and "nan" not in words


@pytest.mark.slow
def test_a_report_takes_the_place_of_nothing_but_a_report(out, capsys):
    mine = out / "there" / "report.md"
    mine.parent.mkdir()
    mine.write_text("of the user")
    assert main(["compare", "report", str(out), "--to", str(out / "there")]) == 1
    assert "there has a report.md of something else" in capsys.readouterr().err
    assert mine.read_text() == "of the user"
    (out / "there" / "report.json").write_text("half")
    assert main(["compare", "report", str(out), "--to", str(out / "there")]) == 1
    for name in ("report.md", "report.json"):
        (out / "there" / name).unlink()
    (out / "there" / "tables").mkdir()  # not of an interrupted report, which begins with its JSON
    assert main(["compare", "report", str(out), "--to", str(out / "there")]) == 1
    assert "there has a tables of something else" in capsys.readouterr().err
    shutil.rmtree(out / "there")
    (out / "report").mkdir()  # of the experiment, with what a killed command left
    (out / "report" / "report.json").write_text("half")
    assert main(["compare", "report", str(out)]) == 0
    for _ in range(2):  # a report of ours is written again
        assert main(["compare", "report", str(out), "--to", str(out / "there")]) == 0
    assert mine.read_text().startswith("# A made-up experiment\n")
    report = json.loads(mine.with_suffix(".json").read_text())
    mine.with_suffix(".json").write_text(json.dumps({**report, "experiment": "another"}))
    assert main(["compare", "report", str(out), "--to", str(out / "there")]) == 1
    assert "there has a report.md of something else" in capsys.readouterr().err


@pytest.mark.slow
def test_a_report_leaves_nothing_of_an_earlier_one(out, tmp_path):
    shutil.copytree(run_folder(out, "gMLP", 1), tmp_path / "run")
    shutil.rmtree(run_folder(out, "gMLP", 1))
    report = write_report(read_results(out)).parent
    record, mine, victim = report / "report.json", report / "tables" / "mine.csv", report.parent / "victim.csv"
    mine.touch()
    victim.touch()
    assert (report / "tables" / "not-whole.csv").is_file()
    said = json.loads(record.read_text())
    said["tables"]["../../victim"] = said["figures"]["gone"] = {}
    record.write_text(json.dumps(said))
    (report / "figures" / "gone.svg").touch()
    shutil.copytree(tmp_path / "run", run_folder(out, "gMLP", 1))
    write_report(read_results(out))
    assert not (report / "tables" / "not-whole.csv").exists() and not (report / "figures" / "gone.svg").exists()
    assert mine.is_file() and victim.is_file()
    (fresh := tmp_path / "fresh").mkdir()
    write_report(read_results(out), fresh)
    mine.unlink()
    assert {path.relative_to(report) for path in report.rglob("*")} == {
        path.relative_to(fresh) for path in fresh.rglob("*")
    }


def test_updates_that_are_smaller_count_as_they_are(out):
    """Ten updates have half the size, as the last ones of epochs; one seed has another one."""
    small = {**dict.fromkeys(SEEDS, 512), SEEDS[0]: 256, SEEDS[1]: 768}
    for model in MODELS:
        for seed in SEEDS:
            times = run_folder(out, model, seed) / "update_times.jsonl"
            lines = [json.loads(line) for line in times.read_text().splitlines()]
            changed = [{**line, "tokens": small[seed] if line["update"] % 4 == 0 else 1024} for line in lines]
            times.write_text("".join(f"{json.dumps(line)}\n" for line in changed))
    experiment = read_results(out)
    assert experiment.mean_update_tokens == 1024 * (6 * 5 + 2 * 2.5) / 40
    assert experiment.trained_tokens == 1024 * 35
    seconds = {run.seed: run.timeline.at(40) for run in experiment.done(experiment.models[0])}
    speeds = cell(tables(out)["speed"], "gMLP", "logged_tokens_per_second").samples
    assert speeds == pytest.approx({seed: (1024 * 30 + small[seed] * 10) / time for seed, time in seconds.items()})
    assert main(["compare", "report", str(out), "--to", str(out / "there")]) == 0
    page = (out / "there" / "report.md").read_text()
    assert "each run has 40 updates of at most 1,024 tokens (35,840 in all)" in page


FIGURES = {
    *("perplexity-updates", "perplexity-time", "perplexity-flops", "final", "quality-and-speed", "routing", "heads"),
    *("feature-routing", "feature-routing-final", "gmlp-moe"),
}


def test_report_links_what_is_there(written):
    page = (written / "report.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert {Path(link).stem for link in links if link.endswith(".png")} == FIGURES
    assert {Path(link).stem for link in links if link.endswith(".svg")} == FIGURES
    assert all((written / link).stat().st_size > 0 for link in links)
    assert "did not finish: sMLP-s1, sMLP-s2, Switch-s3**" in page
    assert "| gMLP-MoE \\| a |" in page
    order = "sMLP 13.53, Switch 14.35, gMLP 15.43, sMLP-partial 16.54, gMLP h=4 16.54, gMLP-MoE | a 17.73."
    assert f"Perplexity per token after the prefix, lowest first: {order}" in page
    assert "agree with what was measured" not in page, "verdicts are no part of a comparison"
    assert "ahead of the sparse Transformers; the figure prints no numbers." in page
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) > 2 for row in rows)


def test_every_number_in_the_json_has_a_source(written):
    report = json.loads((written / "report.json").read_text())
    cells = [
        (name, key, one)
        for name, table in report["tables"].items()
        for row in table["rows"]
        for key, one in row.items()
    ]
    assert len(cells) > 200
    assert [place for *place, one in cells if not one["source"]] == []
    assert set(report["figures"]) == FIGURES
    assert report["runs"]["Switch-s3"] == {"state": "running", "updates": 33}


def test_csv_has_unrounded_values_and_intervals(written):
    rows = list(csv.DictReader((written / "tables" / "quality-valid.csv").open()))
    gmlp = next(row for row in rows if row["model"] == "gMLP h=4")
    values = [2 ** (4.1 + 0.01 * seed) for seed in SEEDS]
    assert float(gmlp["per_token"]) == pytest.approx(sum(values) / 3, rel=1e-12)
    assert float(gmlp["per_token_low"]) < float(gmlp["per_token"]) < float(gmlp["per_token_high"])
    assert gmlp["per_token_seeds"] == "3"
    assert next(row for row in rows if row["model"] == "sMLP-partial")["per_token"] == ""


def test_the_machine_is_that_of_the_runs(out):
    assert describe_machine(read_results(out)) == (
        "Machine: no GPU, 2 cores; 2 runs at a time, each with 1 rank of 1 thread."
    ), "no run has a record of its own"
    record = {"gpu": "NVIDIA H200", "world_size": 4, "threads": 8, "cores": 16, "torch": "2", "git": None}
    for model in MODELS:
        for seed in SEEDS:
            line = {**record, "torch": "3"} if (model, seed) == ("sMLP", 2) else record
            (run_folder(out, model, seed) / "environment.jsonl").write_text(json.dumps(line) + "\n")
    experiment = read_results(out)
    assert describe_machine(experiment) == (
        "Machine: 4 GPUs (NVIDIA H200), 16 cores; 2 runs at a time, each with 4 ranks of 8 threads."
    )
    assert scale_sentences(experiment)[0].endswith("4 GPUs (NVIDIA H200).")
    (sentence,) = differences(experiment)
    assert sentence.startswith("Runs were not made with the same torch: 2 (gMLP-s1, gMLP-s2, ")
    assert sentence.endswith("; 3 (sMLP-s2)")
    (run_folder(out, "gMLP", 1) / "environment.jsonl").write_text("{")
    assert [(run.name, reason) for run, reason in incomplete(read_results(out))] == [
        ("gMLP-s1", "environment.jsonl: 1 of 1 lines are damaged and left out")
    ]
