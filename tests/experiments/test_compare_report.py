"""The report of an experiment, against numbers worked out by hand from the made-up folder."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest
from experiment_folder import MODELS, SEEDS, UPDATES, cell, rewrite, run_folder, tables, write_experiment

from smlp.errors import UserError
from smlp.evaluation.curves import LossPoint
from smlp.experiments.report.details import data_orders
from smlp.experiments.report.figures import _all, write_figures
from smlp.experiments.report.results import read_results
from smlp.experiments.report.speed import Target, first_crossing, mean_curve, targets, time_to_target
from smlp.experiments.report.table import Estimate, t_quantile

pytestmark = pytest.mark.timeout(120)
#: Student's t with 2 degrees of freedom, 97.5 %, from a printed table
T_2 = 4.303


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """All runs done; not to be changed."""
    return write_experiment(tmp_path_factory.mktemp("experiment"))


@pytest.fixture
def out(whole, tmp_path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(whole, tmp_path / "out"))


def test_perplexity_with_its_interval_over_seeds(whole):
    found = cell(tables(whole)["quality-valid"], "gMLP", "per_token")
    # 4 bits and 0.01 for each seed
    values = [16 * 2 ** (0.01 * seed) for seed in SEEDS]
    mean = sum(values) / 3
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / 2)
    assert found.value == pytest.approx(mean)
    assert found.high - found.value == pytest.approx(T_2 * deviation / math.sqrt(3), rel=1e-3)
    assert found.value - found.low == pytest.approx(found.high - found.value)
    assert found.text == "16.22 ± 0.28"
    assert found.source == "runs/{gMLP-s1,gMLP-s2,gMLP-s3}/scores.json: subsets.valid, exp(nll_all)"


def test_t_quantiles_are_those_of_a_printed_table():
    assert [round(t_quantile(degrees), 3) for degrees in (1, 2, 4, 9)] == [12.706, 4.303, 2.776, 2.262]


def test_one_seed_has_no_interval():
    assert Estimate({1: 3.0}).half is None
    assert Estimate({1: 3.0}).mean == 3.0


def test_bits_per_byte(whole, out):
    # 4 bits and 0.01 for each seed, on 4 bytes a token
    found = cell(tables(whole)["quality-valid"], "gMLP", "bits_per_byte")
    assert (found.value, found.text) == (pytest.approx((4 + 0.02) / 4), "1.0050 ± 0.0062")
    assert "bits per byte" in [column.head for column in tables(whole)["summary"].columns]
    settings = json.loads((out / "experiment.json").read_text())
    (out / "experiment.json").write_text(json.dumps({**settings, "task": "masked_lm"}))
    assert "bits_per_byte" not in [column.key for column in tables(out)["quality-valid"].columns]


def test_perplexity_per_word_and_after_the_prefix(whole):
    quality = tables(whole)["quality-valid"]
    nats = [(4 + 0.01 * seed) * math.log(2) for seed in SEEDS]
    assert cell(quality, "gMLP", "per_word").value == pytest.approx(sum(math.exp(nat / 0.75) for nat in nats) / 3)
    assert cell(quality, "gMLP", "after_prefix").value == pytest.approx(sum(math.exp(nat - 0.05) for nat in nats) / 3)
    assert cell(quality, "sMLP-partial", "per_token").value is None
    assert any("sMLP-partial predicts nothing within the first 26 of 128" in note for note in quality.notes)


def test_seeds_pair(whole):
    """Seeds move all models alike, so that the difference has no spread although each model has."""
    found = cell(tables(whole)["quality-valid"], "sMLP", "against_gMLP")
    assert found.value == pytest.approx(100 * (2**-0.2 - 1))
    assert found.low == pytest.approx(found.high)


def test_the_baseline_can_be_chosen(whole):
    quality = tables(whole, "Switch", "sMLP")["quality-valid"]
    assert cell(quality, "gMLP", "against_Switch").value == pytest.approx(100 * (2**0.1 - 1))
    assert [column.key for column in quality.columns if "against" in column.key] == ["against_Switch", "against_sMLP"]
    with pytest.raises(UserError, match="--baseline Swich: the experiment's models are gMLP, sMLP"):
        tables(whole, "Swich")


def test_training_time_is_that_of_the_updates(whole):
    """gMLP's 5 updates take 2.5 s, which the log has as 2."""
    speed = tables(whole)["speed"]
    for model, (*_, pace) in MODELS.items():
        assert cell(speed, model, "training_time_s").value == pytest.approx(pace * UPDATES, rel=1e-3)
        assert cell(speed, model, "logged_tokens_per_second").value == pytest.approx(1024 / pace, rel=1e-3)
        assert cell(speed, model, "logged_words_per_second").value == pytest.approx(0.75 * 1024 / pace, rel=1e-3)
    assert cell(tables(whole)["time-split"], "Switch", "other_s").value == pytest.approx(7.0, abs=0.05)


def test_time_to_a_perplexity_lies_between_validations(out):
    rewrite(out / "experiment.json", targets=[32.0, 2.0])
    speed = tables(out)["speed"]
    # 8 - u / 10 + seed / 100 is 5 bits at u = 30.1, 30.2, 30.3; half a second each
    assert cell(speed, "gMLP", "time_to_32.00_s").value == pytest.approx(15.1, rel=1e-3)
    assert cell(speed, "gMLP", "time_to_32.00_s").samples == pytest.approx({1: 15.05, 2: 15.1, 3: 15.15}, rel=1e-3)
    assert cell(speed, "gMLP", "time_to_2.00_s").text == "not reached"


def test_targets_that_two_decimals_do_not_tell_apart(out):
    rewrite(out / "experiment.json", targets=[1032.0, 32.0, 32.001])
    speed = tables(out)["speed"]
    columns = {column.key: column.head for column in speed.columns if "time_to" in column.key}
    heads = {"1032.000": "1,032.000", "32.000": "32.000", "32.001": "32.001"}
    assert columns == {f"time_to_{key}_s": f"time to {head} (s)" for key, head in heads.items()}
    times = [cell(speed, "gMLP", f"time_to_{key}_s").value for key in ("32.000", "32.001")]
    assert times[0] > times[1] and "32.001 per token: from experiment.json: targets." in speed.notes


def test_sources_name_the_subset(out):
    rewrite(out / "experiment.json", evaluation_subsets=["test"], targets=[32.0])
    for path in out.glob("runs/*/train.log"):
        path.write_text(path.read_text().replace('"valid_', '"test_'))
    results, speed = read_results(out), tables(out)["speed"]
    column = next(column for column in speed.columns if "time_to" in column.key)
    shown = [column.how, cell(speed, "gMLP", column.key).source, next(_all(results))[0].source]
    assert all("test_loss" in text and "valid_loss" not in text for text in shown)


def test_a_single_model_is_compared_with_nothing(tmp_path):
    (note,) = tables(write_experiment(tmp_path, {"gMLP": MODELS["gMLP"]}))["quality-valid"].notes
    assert note == "± is the 95 % interval (Student's t) over seeds."


def test_without_targets_dense_models_and_the_best_sparse_transformer_set_them(whole):
    """gMLP's own mean is what one of its three seeds misses: the mean curve says when."""
    speed = tables(whole)["speed"]
    keys = [column.key for column in speed.columns if "time_to" in column.key]
    assert keys == ["time_to_16.22_s", "time_to_15.14_s"]
    assert "15.14 per token: from the last validation of Switch, mean over seeds." in speed.notes
    # 8 - u / 10 - 0.2 + seed / 100 falls to Switch's mean at u = 38.8, 38.9, 39; 0.8 seconds each
    assert cell(speed, "sMLP", "time_to_15.14_s").value == pytest.approx(0.8 * 39.0, rel=5e-3)
    assert cell(speed, "gMLP", "time_to_16.22_s").text == "20.00 (mean curve; 2 of 3 seeds)"
    assert any(note == "16.22 per token: from the last validation of gMLP, mean over seeds." for note in speed.notes)
    assert cell(speed, "sMLP-partial", "time_to_16.22_s").text == "not reached"


def test_of_several_sparse_transformers_the_best_sets_a_target(tmp_path, monkeypatch):
    more = {**MODELS, "Hash": ("hash_lm", "hash_lm_tiny", {}, -0.15, 0.6)}
    monkeypatch.setattr("experiment_folder.MODELS", more)
    found = targets(read_results(write_experiment(tmp_path / "out", more)))
    origins = [one.origin.split(",")[0] for one in found]
    assert origins == ["the last validation of gMLP", "the last validation of Hash"]


def test_a_run_that_diverged_sets_no_target(tmp_path):
    """It has no points after its divergence, and the others have."""
    out = write_experiment(tmp_path)
    want = targets(read_results(out))[0].perplexity
    log = run_folder(out, "gMLP", 3) / "train.log"
    log.write_text("\n".join(line for line in log.read_text().splitlines() if '"valid_num_updates": "40"' not in line))
    found = targets(read_results(out))[0]
    assert found.origin.startswith("the last validation of gMLP") and found.perplexity == pytest.approx(want, rel=0.01)


def test_losses_of_a_run_that_diverged_are_not_shown(out):
    """Neither beside other seeds nor of one seed alone."""
    log = run_folder(out, "gMLP", 3) / "train.log"
    log.write_text("\n".join(line for line in log.read_text().splitlines() if '"valid_num_updates": "40"' not in line))
    early = Target(2.0**7, "its first validations are below")
    results = read_results(out)
    assert set(time_to_target(results, results.models[0], early).seconds.samples) == {1, 2}
    rewrite(out / "experiment.json", seeds=[3])
    results = read_results(out)
    assert mean_curve(results, results.models[0]) == () != mean_curve(results, results.models[1])
    assert time_to_target(results, results.models[0], early).seconds is None


def test_crossing():
    points = [LossPoint(10, 6.0), LossPoint(20, 5.0), LossPoint(30, 5.5), LossPoint(40, 4.0)]
    assert first_crossing(points, 2**5.25) == pytest.approx(17.5)
    assert first_crossing(points, 2**5.0) == pytest.approx(20)
    assert first_crossing(points, 2**4.75) == pytest.approx(35)
    assert first_crossing(points, 2**7.0) == 10
    assert first_crossing(points, 2**3.0) is None
    assert first_crossing([], 2**3.0) is None


def test_flops_of_training(whole):
    details = tables(whole)["details"]
    record = json.loads((whole / "experiment.json").read_text())["models"][1]
    expected = 3 * record["flops_per_token"] * 1024 * 40 / 1e12
    assert cell(details, "sMLP", "training_multiply_adds_trillions").value == pytest.approx(expected)
    costs = [each["flops_per_token"] for each in json.loads((whole / "experiment.json").read_text())["models"]]
    assert f"differ by {max(costs) / min(costs) - 1:.2%} (1.00% are allowed)" in details.notes[0]


def test_drops_and_realised_work(whole):
    found = tables(whole)
    assert cell(found["work"], "Switch", "drop_percent").value == pytest.approx(25)
    assert cell(found["work"], "Switch", "drop_percent_last").value == pytest.approx(10)
    assert cell(found["work"], "Switch", "ratio").value == pytest.approx(1 - 0.25 / 4)
    layers = found["router-health"]
    assert cell(layers, "Switch", "drop_percent_mean").value == pytest.approx(25)
    assert cell(layers, "Switch", "gate_entropy_last").value == pytest.approx(0.5)
    assert cell(layers, "sMLP", "drop_percent_mean").value is None


def test_speed_json_goes_before_the_logs(out):
    rounds = {"sMLP": [0.1, 0.1, 0.1], "Switch": [0.2, 0.21, 0.19]}
    models = {name: {"seconds_per_update": times, "tokens_per_update": 1024} for name, times in rounds.items()}
    (out / "speed.json").write_text(json.dumps({"models": models, "rounds": 3, "threads": 1, "device": "cpu"}))
    found = tables(out)
    assert cell(found["speed"], "Switch", "timed_words_per_second").value == pytest.approx(0.75 * 1024 / 0.2)


def test_without_words_there_are_tokens(out):
    data = json.loads((out / "data.json").read_text())
    data["splits"]["valid"] |= {"words": None, "words_per_token": None}
    (out / "data.json").write_text(json.dumps(data))
    speed = tables(out)["speed"]
    assert not any("words" in column.key for column in speed.columns)
    assert "Speeds are in tokens, because data.json has no number of words." in speed.notes


def test_data_order_is_compared_and_its_digest_known(out):
    first = data_orders(read_results(out))[0]
    lines = "".join(f"{update} {1000 + update}\n" for update in range(1, UPDATES + 1))
    assert first.agrees and "Runs with the same seed saw the same data" in tables(out)["quality-valid"].notes[0]
    assert set(first.digests.values()) == {hashlib.sha256(lines.encode()).hexdigest()}
    path = run_folder(out, "Switch", 1) / "data_order.jsonl"
    path.write_text(path.read_text().replace('"digest": 1017', '"digest": 7'))
    first, second, _ = data_orders(read_results(out))
    assert (first.agrees, first.differs_at, first.differs.name) == (False, 17, "Switch-s1")
    assert second.agrees
    earlier = run_folder(out, "sMLP-partial", 1) / "data_order.jsonl"
    earlier.write_text(earlier.read_text().replace('"digest": 1020', '"digest": 8'))
    assert data_orders(read_results(out))[0].differs_at == 17
    verdict = tables(out)["data-order"].rows[0]["verdict"].value
    assert verdict == "**no**: Switch-s1 differs from gMLP-s1 from update 17 on"
    (note, *_) = tables(out)["quality-valid"].notes
    assert "not all runs with the same seed saw the same data" in note


def test_grid_of_the_tuning(out):
    results = {"gMLP": {"0.001": 30.0, "0.002": None, "0.004": 25.0}, "sMLP": {"0.001": 31.0, "0.002": 29.0}}
    grid = {"option": "--lr", "values": [0.001, 0.002, 0.004], "updates": 20, "seed": 1, "results": results}
    (out / "tuned.json").write_text(json.dumps({**grid, "chosen": {"gMLP": 0.004, "sMLP": 0.002}}))
    table = tables(out)["tuning"]
    shown = [[row.get(key) and row[key].text for key in ("0.001", "0.002", "0.004", "chosen")] for row in table.rows]
    assert shown == [["30.00", "failed", "25.00", "0.004"], ["31.00", "29.00", None, "0.002"]]
    assert table.notes[1].endswith("might be better: gMLP.")
    (out / "tuned.json").write_text(json.dumps({**grid, "chosen": {"gMLP": 0.001, "sMLP": 0.002}}))
    assert tables(out)["tuning"].notes[0].endswith("but not of gMLP, whose runs had begun when a better one came.")


def test_grid_of_words(out):
    results = {"gMLP": {"inverse_sqrt": 30.0, "fixed": 25.0, "0.5": 40.0, "True": 41.0}}
    grid = {"option": "--x", "values": ["inverse_sqrt", "fixed", 0.5, True], "updates": 20, "seed": 1}
    (out / "tuned.json").write_text(json.dumps({**grid, "results": results, "chosen": {"gMLP": "fixed"}}))
    table = tables(out)["tuning"]
    assert [column.key for column in table.columns] == ["model", "inverse_sqrt", "fixed", "0.5", "True", "chosen"]
    assert [cell.text for cell in table.rows[0].values()] == ["gMLP", "30.00", "25.00", "40.00", "41.00", "fixed"]
    assert len(table.notes) == 1


def test_zero_shot_accuracy_beside_the_papers(out):
    for seed, right in zip(SEEDS, (0.5, 0.6, 0.7), strict=True):
        for model, more in (("sMLP", 0.0), ("Switch", -0.1)):
            task = {"accuracy": right + more, "chance": 0.5, "n": 100}
            (run_folder(out, model, seed) / "zeroshot.json").write_text(json.dumps({"tasks": {"copa": task}}))
    table = tables(out)["zeroshot"]
    assert cell(table, "sMLP", "copa").value == pytest.approx(60)
    assert cell(table, "paper, large: sMLP-deterministic", "copa").value == 79.0
    assert "average" not in next(row for row in table.rows if "paper" in row["model"].value)
    assert len(table.notes) == 1 and "Records: COPA 100." in table.notes[0]
    answered = {name: {"accuracy": 0.5, "chance": 0.5, "n": 100} for name in ("copa", "piqa")}
    (run_folder(out, "Switch", 2) / "zeroshot.json").write_text(json.dumps({"tasks": answered}))
    assert cell(tables(out)["zeroshot"], "chance", "piqa").value == 50, "of the first run that has it"


def test_zero_shot_answers_with_other_settings_are_named(out):
    """Answers from before a change of the file, where the tasks failed afterwards."""
    for model, n, limit in (("sMLP", 100, None), ("Switch", 1020, 1020)):
        content = {"settings": {"model": model, "limit": limit}, "tasks": {"copa": {"accuracy": 0.5, "n": n}}}
        (run_folder(out, model, 1) / "zeroshot.json").write_text(json.dumps(content))
    first, *others = tables(out)["zeroshot"].notes
    assert "Records: COPA 100 or 1,020." in first
    assert others == [
        "**Runs did not answer with the same limit: null (sMLP-s1); 1020 (Switch-s1).**",
        "**Runs did not answer with the same number of records of COPA: 100 (sMLP-s1); 1020 (Switch-s1).**",
    ]


def test_names_with_a_first_underscore_are_in_the_legends(tmp_path, monkeypatch):
    """matplotlib leaves such labels out."""
    monkeypatch.setattr("experiment_folder.MODELS", {"_gMLP": MODELS["gMLP"], "Switch": MODELS["Switch"]})
    results = read_results(write_experiment(tmp_path / "out"))
    legends = [legend for _, figure in _all(results) if figure for legend in figure.legends]
    named = [[text.get_text() for text in legend.get_texts()] for legend in legends]
    assert sum(" _gMLP" in names for names in named) == 4, named


def test_names_with_dollar_signs_are_drawn(tmp_path, monkeypatch):
    models = {"$\\frac$": MODELS["gMLP"], "$^$": MODELS["Switch"]}
    monkeypatch.setattr("experiment_folder.MODELS", models)
    assert len(write_figures(read_results(write_experiment(tmp_path / "out", models)), tmp_path)) == 6
