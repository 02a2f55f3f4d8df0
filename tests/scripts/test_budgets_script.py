"""scripts/compare_budgets.py: differences to the baseline after each budget, from the folders of comparisons."""

import csv
import json
import math
import sys

import numpy as np
import pytest
from experiment_folder import MODELS, UPDATES, write_experiment
from running import REPOSITORY

import smlp


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    import compare_budgets

    return compare_budgets


@pytest.fixture
def run(script, monkeypatch, tmp_path):
    def run(*folders, baseline="gMLP", options=()):
        words = ["--baseline", baseline, "--to", tmp_path / "out", *options, *folders]
        monkeypatch.setattr(sys, "argv", ["compare_budgets.py", *map(str, words)])
        script.main()
        with (tmp_path / "out" / "budgets.csv").open() as file:
            return list(csv.DictReader(file))

    return run


def test_each_model_after_each_budget(run, tmp_path, capsys):
    large = write_experiment(tmp_path / "large", updates=UPDATES)
    small = write_experiment(
        tmp_path / "small", {name: MODELS[name] for name in MODELS if name != "Switch"}, tokens_per_update=512
    )
    rows = run(large, small)
    shown = [(row["model"], int(row["tokens"]), row["seeds"]) for row in rows]
    assert shown[:3] == [("gMLP", UPDATES * 512, "3"), ("gMLP", UPDATES * 1024, "3"), ("sMLP", UPDATES * 512, "3")]
    assert {row["model"] for row in rows} == set(MODELS)
    switch = next(row for row in rows if row["model"] == "Switch")
    # 0.1 bits below gMLP for every seed
    assert float(switch["difference_percent"]) == pytest.approx(100 * (2**-0.1 - 1))
    assert float(switch["low"]) == pytest.approx(float(switch["high"]))
    assert (switch["pairs"], rows[0]["pairs"]) == ("3", ""), "none of the baseline with itself"
    assert float(switch["perplexity"]) == pytest.approx(
        sum(2 ** (8 - UPDATES / 10 - 0.1 + 0.01 * seed) * math.exp(-0.05) for seed in (1, 2, 3)) / 3
    )
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "| model | parameters (M) | 20,480 tokens | 40,960 tokens |"
    assert next(line for line in printed if "Switch" in line).split(" | ")[2] == "–", "the small one has no Switch"
    assert printed[-1] == "| learning rate | | 0.002 | 0.002 |" and {row["lr"] for row in rows} == {"0.002"}
    assert all((tmp_path / "out" / f"budgets.{ending}").stat().st_size > 5000 for ending in ("png", "svg"))


def test_a_model_without_a_seed_of_the_baseline_has_no_difference(run, tmp_path, capsys):
    folder = write_experiment(tmp_path / "one")
    for name in ("Switch-s2", "Switch-s3", "gMLP-s1"):
        (folder / "runs" / name / "scores.json").unlink()
    switch = next(row for row in run(folder) if row["model"] == "Switch")
    assert (switch["seeds"], switch["pairs"], switch["low"]) == ("1", "", "")
    assert float(next(line for line in capsys.readouterr().out.splitlines() if "Switch" in line).split(" | ")[2][:-2])


def test_budgets_are_told_apart_on_the_axis(script):
    budgets = (2_000, 1_310_720, 1_340_000, 131_072_000)
    assert [script.amount_of(tokens) for tokens in budgets] == ["2,000", "1.31 M", "1.34 M", "131.07 M"]


def test_other_positions_are_refused(run, tmp_path):
    large = write_experiment(tmp_path / "large")
    small = write_experiment(tmp_path / "small", {"gMLP": MODELS["gMLP"]}, tokens_per_update=512)
    with pytest.raises(smlp.UserError, match=r"small counts the positions after a prefix of 0 tokens, and "):
        run(large, small)


def test_the_line_over_the_tokens_is_that_of_least_squares(run, tmp_path, capsys):
    folders = [write_experiment(tmp_path / f"{size}", tokens_per_update=size) for size in (512, 1024, 4096)]
    points = []
    for number, folder in enumerate(folders):
        for seed in (1, 2, 3):
            for model, nats in (("gMLP", 3.0), ("Switch", 2.9 - 0.01 * number**1.5 + 0.003 * seed**2)):
                path = folder / "runs" / f"{model}-s{seed}" / "scores.json"
                scores = json.loads(path.read_text())
                scores["subsets"]["valid"]["nll_after_prefix"] = nats
                path.write_text(json.dumps(scores))
            points.append((math.log10(UPDATES * (512, 1024, 4096)[number]), nats - 3.0))
    run(*folders, options=("--predict", "1e9"))
    row = next(line for line in capsys.readouterr().out.splitlines()[7:] if line.startswith("| Switch | 9 |"))
    design = np.array([[1, x - 9] for x, _ in points])
    values = np.array([y for _, y in points])
    best, residual, *_ = np.linalg.lstsq(design, values)
    errors = np.sqrt(np.diag(np.linalg.inv(design.T @ design)) * residual / 7)
    # 2.365: Student's t with 7 degrees of freedom, 97.5 %, from a printed table
    at_1e9, tenfold = ([100 * math.expm1(mean + end) for end in (0, -2.365 * error, 2.365 * error)]
                       for mean, error in zip(best, errors, strict=True))  # fmt: skip
    assert row.endswith(" | ".join("{:+.1f} % [{:+.1f}, {:+.1f}]".format(*cell) for cell in (tenfold, at_1e9)) + " |")


@pytest.mark.parametrize(("step", "shown"), [(0.0, "+0.0 % [+0.0, +0.0]"), (-0.0625, "["), (300.0, "+1e+306 %")])
def test_lines_through_all_points_and_of_diverged_models_have_numbers(run, tmp_path, capsys, step, shown):
    folders = [write_experiment(tmp_path / f"{size}", tokens_per_update=size) for size in (512, 1024, 2048)]
    for number, folder in enumerate(folders):
        for path in folder.glob("runs/*/scores.json"):
            scores = json.loads(path.read_text())
            scores["subsets"]["valid"]["nll_after_prefix"] = 3.0 + step * number * ("Switch" in str(path))
            path.write_text(json.dumps(scores))
    run(*folders, options=("--predict", "1e9"))
    row = next(line for line in capsys.readouterr().out.splitlines()[7:] if line.startswith("| Switch | 9 |"))
    assert shown in row and "nan" not in row


def test_what_cannot_be_compared_is_refused(run, tmp_path):
    one = write_experiment(tmp_path / "one")
    with pytest.raises(smlp.UserError, match=r"one and .*two have the same budget, 40,960 tokens"):
        run(one, write_experiment(tmp_path / "two"))
    with pytest.raises(smlp.UserError, match=r"--baseline BASE: the models of .*one are gMLP, sMLP, "):
        run(one, baseline="BASE")
    with pytest.raises(smlp.UserError, match=r"nothing/experiment\.json cannot be read"):
        run(tmp_path / "nothing")
    large = write_experiment(tmp_path / "large", updates=2 * UPDATES)
    data = json.loads((large / "data.json").read_text())
    (large / "data.json").write_text(json.dumps({**data, "vocab_size": 600}))
    with pytest.raises(smlp.UserError, match="cannot be compared: the size of the vocabulary is 512 and 600"):
        run(large, one)
    (large / "data.json").write_text(json.dumps(data))
    settings = json.loads((large / "experiment.json").read_text())
    settings["models"][1]["parameters"]["total"] += 1
    (large / "experiment.json").write_text(json.dumps(settings))
    with pytest.raises(smlp.UserError, match=r"cannot be compared: the number of parameters of sMLP is"):
        run(large, one)
    middle = write_experiment(tmp_path / "middle", updates=UPDATES * 3 // 2)
    settings = json.loads((middle / "experiment.json").read_text())
    del settings["models"][1]
    (middle / "experiment.json").write_text(json.dumps(settings))
    with pytest.raises(smlp.UserError, match=r"one and .*large cannot be compared: the number of parameters of sMLP"):
        run(one, middle, large)


def test_scores_of_another_subset(run, tmp_path):
    folder = write_experiment(tmp_path / "one")
    for path in folder.glob("runs/*/scores.json"):
        scores = json.loads(path.read_text())
        scores["subsets"]["test"] = scores["subsets"]["valid"] | {
            "nll_after_prefix": 3.0 + 0.1 * path.parent.name.startswith("Switch")
        }
        path.write_text(json.dumps(scores))
    settings = json.loads((folder / "experiment.json").read_text())
    settings["evaluation_subsets"] = ["valid", "test"]
    (folder / "experiment.json").write_text(json.dumps(settings))
    on_valid, on_test = (run(folder, options=options) for options in ((), ("--subset", "test")))
    differences = [
        next(float(row["difference_percent"]) for row in rows if row["model"] == "Switch")
        for rows in (on_valid, on_test)
    ]
    assert differences == pytest.approx([100 * (2**-0.1 - 1), 100 * math.expm1(0.1)])
    with pytest.raises(smlp.UserError, match=r"--subset train: the runs of .*one scored valid, test"):
        run(folder, options=("--subset", "train"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--predict", "0"], "--predict must be a number of tokens, at least 1, got 0.0"),
        (["--predict", "nan"], "--predict must be a number of tokens, at least 1, got nan"),
        (["--predict", "1e9"], "--predict needs runs of a model and the baseline after at least two budgets"),
        (["--to", __file__], f"--to {__file__} is a file"),
    ],
)
def test_bad_options_are_one_sentence(run, tmp_path, options, message):
    with pytest.raises(smlp.UserError, match=message):
        run(write_experiment(tmp_path / "one"), options=options)


def test_a_table_of_something_else_is_not_replaced(run, tmp_path):
    mine = tmp_path / "budgets" / "budgets.csv"
    mine.parent.mkdir()
    mine.write_text("month,euro\n")
    with pytest.raises(smlp.UserError, match=r"has a budgets\.csv of something else"):
        run(write_experiment(tmp_path / "one"), options=("--to", str(mine.parent)))
    assert mine.read_text() == "month,euro\n"


def test_folders_without_a_finished_run_are_refused(run, tmp_path):
    folder = write_experiment(tmp_path / "one")
    for scores in folder.glob("runs/*/scores.json"):
        scores.unlink()
    with pytest.raises(smlp.UserError, match=f"--baseline gMLP: no run of it has finished in {folder}"):
        run(folder)
    assert not (tmp_path / "out").exists()


def test_names_may_hold_dollar_signs(run, tmp_path, monkeypatch):
    models = {"$\\frac$": MODELS["gMLP"], "$^$": MODELS["sMLP"]}
    monkeypatch.setattr("experiment_folder.MODELS", models)
    assert len(run(write_experiment(tmp_path / "one", models), baseline="$\\frac$")) == 2
