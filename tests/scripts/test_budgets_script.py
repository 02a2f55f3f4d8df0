"""scripts/compare_budgets.py: differences to the baseline after each budget, from the folders of comparisons."""

import csv
import math
import sys

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
    def run(*folders, baseline="gMLP"):
        words = ["--baseline", baseline, "--to", tmp_path / "out", *folders]
        monkeypatch.setattr(sys, "argv", ["compare_budgets.py", *map(str, words)])
        script.main()
        with (tmp_path / "out" / "budgets.csv").open() as file:
            return list(csv.DictReader(file))

    return run


def test_each_model_after_each_budget(run, tmp_path, capsys):
    large = write_experiment(tmp_path / "large", updates=UPDATES)
    small = write_experiment(
        tmp_path / "small", {name: MODELS[name] for name in ("gMLP", "sMLP")}, tokens_per_update=512
    )
    rows = run(large, small)
    shown = [(row["model"], int(row["tokens"]), row["seeds"]) for row in rows]
    assert shown[:3] == [("gMLP", UPDATES * 512, "3"), ("gMLP", UPDATES * 1024, "3"), ("sMLP", UPDATES * 512, "3")]
    assert {row["model"] for row in rows} == set(MODELS)
    switch = next(row for row in rows if row["model"] == "Switch")
    # 0.1 bits below gMLP for every seed
    assert float(switch["difference_percent"]) == pytest.approx(100 * (2**-0.1 - 1))
    assert float(switch["low"]) == pytest.approx(float(switch["high"]))
    assert float(switch["perplexity"]) == pytest.approx(
        sum(2 ** (8 - UPDATES / 10 - 0.1 + 0.01 * seed) * math.exp(-0.05) for seed in (1, 2, 3)) / 3
    )
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "| model | parameters (M) | 0.02 M tokens | 0.04 M tokens |"
    assert next(line for line in printed if "Switch" in line).split(" | ")[2] == "–", "the small one has no Switch"
    assert printed[-1] == "| learning rate | | 0.002 | 0.002 |" and {row["lr"] for row in rows} == {"0.002"}
    assert all((tmp_path / "out" / f"budgets.{ending}").stat().st_size > 5000 for ending in ("png", "svg"))


def test_what_cannot_be_compared_is_refused(run, tmp_path):
    one = write_experiment(tmp_path / "one")
    with pytest.raises(smlp.UserError, match=r"one and .*two have the same budget, 40,960 tokens"):
        run(one, write_experiment(tmp_path / "two"))
    with pytest.raises(smlp.UserError, match=r"--baseline BASE: the models of .*one are gMLP, sMLP, "):
        run(one, baseline="BASE")
    with pytest.raises(smlp.UserError, match=r"cannot read .*nothing"):
        run(tmp_path / "nothing")
