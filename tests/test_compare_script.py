"""The parts of scripts/compare_architectures.py that need no training."""

import sys

import pytest
from running import REPOSITORY

import smlp


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    import compare_architectures

    yield compare_architectures
    for name in ("compare_architectures", "training_runs", "training_display"):
        sys.modules.pop(name, None)


def test_all_ten_families_are_compared_at_equal_flops(script):
    assert len(script.ARCHS) == 10 and {f"{arch}" for arch in script.ARCHS} == {
        arch for arch in smlp.PRESETS if arch.endswith("_tiny")
    }
    flops = script.check_flops(4104)
    compared = [flops[arch] for arch in script.ARCHS]
    assert max(compared) / min(compared) < 1.01 and len(flops) == 11


def test_unequal_flops_are_refused(script, monkeypatch):
    monkeypatch.setattr(script, "MAX_SPREAD", 0.001)
    with pytest.raises(smlp.UserError, match=r"differ by 0\.5"):
        script.check_flops(4104)


def test_every_twentieth_line_is_held_out(script, tmp_path):
    text = tmp_path / "text"
    text.write_text("".join(f"line {number}\n" for number in range(50)))
    script.split_text(text, tmp_path / "split")
    assert (tmp_path / "split" / "valid.txt").read_text() == "line 0\nline 20\nline 40\n"
    train = (tmp_path / "split" / "train.txt").read_text().splitlines()
    assert len(train) == 47 and "line 20" not in train and train[0] == "line 1"
    with pytest.raises(smlp.UserError, match=r"cannot read \S*missing"):
        script.split_text(tmp_path / "missing", tmp_path / "split")


def test_the_table_leaves_out_what_a_model_does_not_predict(script):
    row = {
        "name": "m", "nll": {"all": 3.0, "after_prefix": 2.0}, "counts_prefix": True, "flops": 5e6, "realised": 0.99,
        "dropped": 0.25, "words_per_second": 1234.5, "peak_memory_mib": 800.0, "parameters": 1.3e7,
    }  # fmt: skip
    whole, partial = script.table([row, {**row, "counts_prefix": False}], words_per_token=0.5).splitlines()[2:]
    assert whole == "| m | 20.09 | 7.39 | 54.6 | 5.000 | 0.990 | 25.0% | 1,234 | 800 | 13.0 |"
    assert partial == "| m |  | 7.39 | 54.6 | 5.000 | 0.990 | 25.0% | 1,234 | 800 | 13.0 |"


@pytest.mark.slow
def test_only_leaky_routing_predicts_noise(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    import leak_on_noise

    leaky = leak_on_noise.train_and_score("smlp_leaky_tiny", num_updates=120)
    partial = leak_on_noise.train_and_score("smlp_partial_tiny", num_updates=30)
    assert leaky.one_pass < 7.7 and leaky.stepwise > 8, leaky
    assert partial.one_pass > 7.9 and partial.stepwise == pytest.approx(partial.one_pass, rel=1e-4), partial
