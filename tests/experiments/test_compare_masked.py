"""Comparisons of masked language models: their scores and the table beside the paper's, against written-out numbers."""

from __future__ import annotations

import json
import math

import pytest
import torch
from experiment_folder import UPDATES, rewrite, run_folder, tables, write_experiment
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder
from fairseq.tasks.masked_lm import MaskedLMConfig
from tiny_checkpoints import WORDS, write_checkpoint

from smlp.errors import UserError
from smlp.experiments.folder import Folder, RunFolder
from smlp.experiments.report.results import read_results
from smlp.experiments.report.write import document
from smlp.experiments.scores import score_run

#: name: family, architecture, settings, bits above the loss that the folder's runs share, seconds of an update
MASKED = {
    "Mixer": (None, "mixer_mlm_tiny", {}, 1.0, 0.1),
    "gMLP": (None, "gmlp_mlm_tiny", {}, -1.0, 0.1),
    "aMLP": (None, "amlp_mlm_tiny", {}, -2.0, 0.1),
    "BERT": (None, "bert_mlm_tiny", {}, 0.0, 0.1),
    "BERT+rel": (None, "bert_mlm_rel_tiny", {}, 2.0, 0.1),
}


@pytest.fixture
def made(tmp_path, monkeypatch):
    """``made(*names)`` is the folder of an experiment with these models."""

    def make(*names):
        models = {name: MASKED[name] for name in names or MASKED}
        monkeypatch.setattr("experiment_folder.MODELS", models)
        return write_experiment(tmp_path / "out", models, task="masked_lm")

    return make


def test_models_stand_beside_the_papers_in_its_order(made):
    """Table 3 has no aMLP. At the end a run has 2 ** (4 + its model's bits + 0.01 * seed)."""
    table = tables(made())["gmlp-table-3"]
    shown = [(row["model"].text, row["paper"].text, round(row["per_token"].value, 2)) for row in table.rows]
    assert shown == [
        ("BERT+rel", "4.26", 64.89),  # mean of 64.45, 64.89 and 65.34
        ("gMLP", "4.35", 8.11),
        ("BERT", "4.37", 16.22),
        ("Mixer", "5.34", 32.45),
    ]
    assert [round(value, 2) for value in table.rows[0]["per_token"].samples.values()] == [64.45, 64.89, 65.34]
    assert "order of the models can be compared" in table.notes[0]


def test_one_model_of_the_papers_makes_no_table(made):
    assert "gmlp-table-3" not in tables(made("gMLP", "aMLP"))


def test_the_page_is_about_masked_tokens(made):
    results = read_results(made())
    page = document(results, tables(results.folder), {})
    assert "Perplexity per masked token, lowest first: aMLP 4.06, gMLP 8.11, BERT 16.22" in page
    assert "The paper's numbers are from Liu et al., 2021 (arXiv:2105.08050), Table 3, and" in page
    assert "## Table 3 of the gMLP paper" in page and "## The paper's figures" not in page


@pytest.fixture
def scored(made, tmp_path):
    """A run whose model gives every token the same probabilities, whatever it reads; all tokens are masked.

    <s> has 1/8, 'the' 1/2, 's1' 1/4; 12 others share the last eighth. ``valid`` has 10 x 'the' and 4 x 's1' in two
    blocks of <s> and 7 tokens: (10 * 1 + 4 * 2 + 2 * 3) / 16 = 1.5 bits. ``more`` has 7 x 's1' in one: 17 / 8 bits.
    """
    out, data = made("gMLP"), tmp_path / "data"
    data.mkdir()
    for subset, ids in {"valid": [4] * 6 + [5] * 4 + [4] * 4, "more": [5] * 7}.items():
        builder = MMapIndexedDatasetBuilder(str(data / f"{subset}.bin"))
        builder.add_item(torch.tensor(ids))
        builder.finalize(str(data / f"{subset}.idx"))
    path, encoder = write_checkpoint(data, WORDS, "gmlp_mlm_tiny", 8, num_sparse_layers=0)
    p_V = torch.full((encoder.config.vocab_size,), 1 / 8 / 12)
    p_V[0], p_V[4], p_V[5] = 1 / 8, 1 / 2, 1 / 4
    assert float(p_V.sum()) == pytest.approx(1)
    state = torch.load(path, weights_only=True)
    for name, tensor in state["model"].items():
        tensor.copy_(p_V.log()) if name == "encoder.core.head.bias" else tensor.zero_()
    options = MaskedLMConfig(data=str(data), tokens_per_sample=8, sample_break_mode="none", mask_prob=1 - 1e-9, seed=5)
    own = {name: None if str(value).startswith("${") else value for name, value in vars(options).items()}
    state["cfg"]["task"] = {**own, "dataset_impl": "mmap", "_name": "masked_lm"}
    state["optimizer_history"] = [{"num_updates": UPDATES}]
    run = run_folder(out, "gMLP", 1)
    torch.save(state, run / "checkpoint_last.pt")
    rewrite(out / "experiment.json", evaluation_subsets=["valid", "more"], batch_size=1)
    rewrite(out / "data.json", data=f"{data}:another")
    (run / "scores.json").unlink()
    (run / "train.log").write_text(json.dumps({"valid_loss": "1.500", "valid_num_updates": str(UPDATES)}) + "\n")
    return Folder(out), RunFolder(run)


def test_scores_are_the_mean_over_masked_tokens(scored):
    found = score_run(*scored, device="cpu")
    bits = {"valid": (1.5, 16), "more": (17 / 8, 8)}
    assert list(found["subsets"]) == list(bits)
    for subset, (loss, count) in bits.items():
        own = found["subsets"][subset]
        assert own["nll_all"] == own["nll_after_prefix"] == pytest.approx(loss * math.log(2), abs=1e-6)
        assert (own["tokens"], own["words"]) == (count, None) and "nll_own" not in own
    assert (found["prefix"], found["num_updates"], found["dtype"]) == (0, UPDATES, "fp32")


def test_scores_that_differ_from_the_training_are_refused(scored):
    folder, run = scored
    run.log.write_text(run.log.read_text().replace("1.500", "1.510"))
    with pytest.raises(UserError, match=r"1\.0397 nats per token on valid, but .* after update 40, gave 1\.0467"):
        score_run(folder, run, device="cpu")
