"""``smlp finetune``: what is planned and refused, the choice of a point, medians, resuming, and a small real run."""

import contextlib
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from running import USER_DIR
from tiny_checkpoints import WORDS, write_checkpoint

from smlp.cli.finetune import plan_of
from smlp.cli.main import command_parser, main
from smlp.errors import UserError
from smlp.experiments import finetuning
from smlp.experiments.finetuning import METRICS
from smlp.experiments.folder import Folder
from smlp.experiments.medians import Median, page, results_of

pytestmark = pytest.mark.long
TOKENIZER = {"path": "tok", "sha256": {"dict.txt": "0"}}
# Writes the log of a training: accuracies by learning rate and seed; fails for some.
TRAINER = """
import json, os, signal, sys, time
from pathlib import Path
words = sys.argv[1:]
given = {word: words[place + 1] for place, word in enumerate(words[:-1]) if word.startswith("--")}
lr, seed, updates = float(given["--lr"]), given["--seed"], given["--max-update"]
scores = json.loads(Path("scores.json").read_text())[f"{lr:g}"]
with open("started", "a") as file:
    file.write(f"{lr:g}-{seed}\\n")
score = scores[int(seed) - 1]
if score == "stop alone":
    sys.exit(75)
if score is None:
    sys.exit("smlp: error: it diverged")
if score == "stop":
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)  # until this one is stopped as well
Path(given["--save-dir"], "checkpoint_last.pt").write_text("weights")
pairs = [("1", "99"), (updates, score)]
lines = [{"valid_loss": "1", "valid_accuracy": value, "valid_num_updates": at} for at, value in pairs]
Path(given["--log-file"]).write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""


def write_data(folder, step="glue", task="SST-2", classes=("0", "1"), rows=100, words=WORDS, **splits):
    """A folder of which only the manifest and the dictionaries are read."""
    facts = {"glue": {"rows": rows, "labels": {}}, "squad": {"questions": rows, "unanswerable": 0}}[step]
    splits = {"train": facts, "valid": facts, **splits}
    settings = {"task": task, "tokenizer": TOKENIZER}
    places = [folder] if step == "squad" else [folder / "input0", folder / "label"]
    for place, symbols in zip(places, (words, classes), strict=False):
        place.mkdir(parents=True)
        (place / "dict.txt").write_text("".join(f"{word} 1\n" for word in symbols))
    content = {"step": step, "settings": settings, "splits": splits, "classes": list(classes)}
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder


def write_encoder(folder, arch="gmlp_mlm_tiny", **over):
    sizes = {"num_dense_layers": 1, "num_sparse_layers": 0, "embed_dim": 16, "ffn_dim": 16, **over}
    return write_checkpoint(folder, WORDS, arch, 200, **sizes)[0]


@pytest.fixture
def asked(tmp_path):
    """``asked(*words)`` is the plan of a command line on small files."""
    encoder, data = write_encoder(tmp_path / "ck"), write_data(tmp_path / "sst")

    def ask(*words, encoder=encoder, data=data):
        parser = command_parser("finetune")
        return plan_of(parser.parse_args([str(encoder), str(data), "--out", str(tmp_path / "out"), *map(str, words)]))

    return ask


def test_the_grid_is_the_papers(asked, tmp_path):
    plan = asked()
    assert plan.grid == [(lr, size) for size in (16, 32) for lr in (1e-5, 2e-5, 3e-5)] and plan.seeds == (1, 2, 3, 4, 5)
    assert [run.name for run in plan.runs()[:2]] == ["lr1e-05-b16-s1", "lr2e-05-b16-s1"] and len(plan.runs()) == 30
    options = plan.options(plan.runs()[0])
    assert (options["max_update"], options["warmup_updates"]) == (7 * 5, round(3.5)), "7 batches of 100 rows, 5 epochs"
    assert plan.options(plan.runs()[-1])["max_update"] == 4 * 5
    assert (options["max_positions"], options["dropout"], options["attention_dropout"]) == (128, 0.1, None)
    words = " ".join(plan.words(plan.runs()[0], tmp_path))
    for option in (
        "--num-classes 2",
        "--arch gmlp_mlm_tiny --",
        "--embed-dim 16",
        "--finetune-from-model",
        "--init-token 0",
    ):
        assert option in words
    assert "--regression-target" not in words and "--report" not in words

    squad = write_data(tmp_path / "squad", "squad", valid={"questions": 9, "unanswerable": 1})
    plan = asked(encoder=write_encoder(tmp_path / "amlp", "amlp_mlm_tiny"), data=squad)
    options = plan.options(plan.runs()[0])
    assert plan.grid == [(5e-5, 32)] and (options["max_update"], options["warmup_updates"]) == (8000, 1000)
    assert (options["max_positions"], options["attention_dropout"]) == (200, 0.1), "of a context of 200 tokens"
    assert plan.data.task == "SQuAD v2.0"


def test_an_encoder_may_have_other_blocks_than_its_architecture(asked, tmp_path):
    plan = asked(encoder=write_encoder(tmp_path / "other", "bert_mlm_tiny", dense_block="gmlp"))
    assert "--dense-block gmlp" in " ".join(plan.words(plan.runs()[0], tmp_path))


def test_data_named_like_an_option_are_a_path(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data(Path("-sst"))
    plan = asked(data="./-sst")
    assert plan.words(plan.runs()[0], tmp_path)[0] == "./-sst"


def test_every_value_can_be_given(asked):
    plan = asked(
        *("--lr", "1e-4", "3e-4", "--batch-size", "8", "--epochs", "3", "--seeds", "7", "--warmup", "0"),
        *("--max-positions", "9", "--dropout", "0", "--weight-decay", "0.2", "--train-options", "--bf16 --clip-norm 1"),
    )
    assert plan.grid == [(1e-4, 8), (3e-4, 8)] and len(plan.runs()) == 2
    options = plan.options(plan.runs()[0])
    wanted = {"max_update": 39, "warmup_updates": 0, "max_positions": 9, "dropout": 0.0, "weight_decay": 0.2}
    assert {name: options[name] for name in wanted} == wanted
    assert plan.words(plan.runs()[0], Path("x"))[-3:] == ["--bf16", "--clip-norm", "1"]


@pytest.mark.parametrize(
    ("task", "classes", "metric", "option"),
    [
        ("CoLA", ("0", "1"), "mcc", "--report-mcc"),
        ("QQP", ("0", "1"), "acc_and_f1", "--report-acc-and-f1"),
        ("STS-B", (), "pearson_and_spearman", "--report-pearson-and-spearman"),
        ("RTE", ("entailment", "not_entailment"), "accuracy", "--num-classes 2"),
    ],
)
def test_metrics_are_those_of_glue(asked, tmp_path, task, classes, metric, option):
    plan = asked(data=write_data(tmp_path / task, task=task, classes=classes))
    words = " ".join(plan.words(plan.runs()[0], tmp_path))
    assert plan.data.metric == metric and f"--best-checkpoint-metric {metric} " in words and option in words
    assert ("--num-classes 1 --regression-target" in words) == (task == "STS-B")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "0"], "--lr must be above 0"),
        (["--lr", "nan"], "--lr must be above 0"),
        (["--lr", "1", "1e0"], "a value is given twice"),
        (["--batch-size", "-1"], "--batch-size must be at least 1"),
        (["--seeds", "1", "4293918721"], "--seeds must be at least 0 and at most 4,293,918,720, got 4293918721"),
        (["--out", __file__], f"--out {__file__} is a file: name a folder"),
        (["--seeds", "1", "1"], "a value is given twice"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--epochs", "1", "--updates", "9"], "give --epochs or --updates"),
        (["--warmup", "1"], "--warmup must be below 1"),
        (["--dropout", "nan"], "--dropout must be"),
        (["--max-positions", "201"], "has a context of 200 tokens"),
        (["--metric", "f2"], "--metric 'f2' is not one of accuracy"),
        (["--metric", "pearson_and_spearman"], "has 2 classes"),
        (["--train-options=--lr=3"], "--train-options --lr=3"),
        (["--train-options=--dropout=0.3"], "--train-options --dropout=0.3"),
        (["--train-options", "--optimizer sgd"], "--train-options --optimizer: smlp finetune sets this itself"),
        (["--train-options=-h"], "--train-options -h prints help and trains nothing: leave it out"),
        (["--train-options=-a bert_mlm_tiny"], "--train-options -a: smlp finetune sets this itself"),
        (["--train-options", "--update-freq 4"], "--train-options --update-freq: smlp finetune sets this itself"),
        (
            ["--train-options=--patience 1"],
            "--train-options --patience: a run of smlp finetune has a set number of updates",
        ),
        (["--train-options", "'"], "No closing quotation"),
        (["--train-options=--no-such-option"], "--no-such-option"),
    ],
)
def test_bad_options_are_one_sentence(asked, words, message):
    with pytest.raises(UserError) as refused:
        asked(*words)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_bad_files_are_one_sentence(asked, tmp_path):
    def refused(**files):
        with pytest.raises(UserError) as found:
            asked(**files)
        assert "\n" not in str(found.value)
        return str(found.value)

    assert "there is no checkpoint" in refused(encoder=tmp_path / "none.pt")
    model = write_checkpoint(tmp_path / "lm", WORDS)[0]
    assert "is a language model (smlp_tiny): fine-tuning needs an encoder" in refused(encoder=model)
    assert "there is no file" in refused(data=tmp_path)
    own = write_data(tmp_path / "own", task=None)
    assert "names no GLUE task: give --metric" in refused(data=own)
    assert asked("--metric", "mcc", data=own).data.metric == "mcc"
    assert "has a vocabulary of 15 symbols" in refused(data=write_data(tmp_path / "less", words=WORDS[1:]))
    (tmp_path / "ck" / "dict.txt").write_text("".join(f"{word} 1\n" for word in reversed(WORDS)))
    assert "differs from it from line 1 on" in refused()
    (tmp_path / "ck" / "dict.txt").unlink()
    (tmp_path / "ck" / "sentencepiece.model").write_text("another")
    TOKENIZER_2 = {"sha256": {"sentencepiece.model": "0"}}
    manifest = json.loads((tmp_path / "sst" / "manifest.json").read_text())
    manifest["settings"]["tokenizer"] = TOKENIZER_2
    (tmp_path / "sst" / "manifest.json").write_text(json.dumps(manifest))
    assert "was made with another sentencepiece.model" in refused()
    manifest["splits"]["train"]["rows"] = 0
    (tmp_path / "sst" / "manifest.json").write_text(json.dumps(manifest))
    assert "manifest.json is damaged: splits.train.rows must be at least 1, got 0" in refused()
    (tmp_path / "sst" / "manifest.json").write_text("{")
    assert "is damaged" in refused()
    data = write_data(tmp_path / "words", task="CoLA", classes=("no", "yes"))
    assert "needs the labels 0 and 1" in refused(data=data)


def test_medians_and_intervals_by_hand():
    assert Median.of([3, 1, 2, 5, 4]) == Median(3, 1, 5, 1 - 2 / 32)
    assert Median.of([8, 1, 2, 3, 4, 5, 6, 7]) == Median(4.5, 2, 7, 1 - 2 * (1 + 8) / 256)
    assert Median.of(range(10)) == Median(4.5, 1, 8, 1 - 2 * (1 + 10) / 1024), "the next one has 89 %"
    assert Median.of([1, 2]) == Median(1.5, 1, 2, 0.5)
    assert Median.of([7.0]) == Median(7.0, 7.0, 7.0, 0.0)


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """``trainer(scores)`` replaces trainings by a program that logs these accuracies, by learning rate and seed."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    monkeypatch.setattr(finetuning, "this_program", lambda: [sys.executable, str(tmp_path / "trainer.py")])
    monkeypatch.chdir(tmp_path)
    encoder, data = write_encoder(tmp_path / "ck"), write_data(tmp_path / "sst")

    def train(scores, *words, seeds=(1, 2, 3)):
        (tmp_path / "scores.json").write_text(json.dumps(scores))
        (tmp_path / "started").write_text("")
        grid = ["--lr", *scores, "--batch-size", "16", "--seeds", *map(str, seeds), "--jobs", "2", "--cpu", *words]
        status = main(["finetune", str(encoder), str(data), "--out", "out", *grid])
        return status, sorted((tmp_path / "started").read_text().split())

    return train


def found(tmp_path):
    return json.loads((tmp_path / "out" / "results.json").read_text())


def test_the_point_with_the_best_median_is_chosen(trainer, tmp_path, capsys):
    scores = {"1e-05": [80, 81, 99], "2e-05": [82, 83, 84], "3e-05": [83, 83, 50]}
    assert trainer(scores)[0] == 0
    results = found(tmp_path)
    assert results["best"]["lr"] == 2e-5, "not the best mean or run; of equals the first; not an earlier validation"
    assert results["best"]["medians"]["valid"]["accuracy"] == {"value": 83, "low": 82, "high": 84, "confidence": 0.75}
    assert results["points"][0]["runs"]["3"]["scores"] == {"valid": {"accuracy": 99}} and not results["at_edge"]
    said = capsys.readouterr().out
    assert "| **2e-05** | **16** | **3 of 3** | **83 [82, 84]: 82, 83, 84** |" in said
    assert "with a confidence of 75.00%. They" in said and "at the edge" not in said
    assert (tmp_path / "out" / "results.md").read_text() in said
    assert not list((tmp_path / "out").rglob("checkpoint*"))


@pytest.mark.slow
def test_what_is_done_is_kept_and_what_failed_is_named_and_tried_again(trainer, tmp_path, capsys):
    status, started = trainer({"1e-05": [80, 81, 82], "2e-05": [90, None, 90]})
    assert status == 1 and len(started) == 6
    said = capsys.readouterr().out
    assert "failed: lr2e-05-b16-s2: train failed with status 1: smlp: error: it diverged" in said
    assert "seed 2: train failed" in (tmp_path / "out" / "results.md").read_text()
    assert found(tmp_path)["best"]["lr"] == 1e-5, "the other point lacks a run"
    status, started = trainer({"1e-05": [80, 81, 82], "2e-05": [90, "nan", 90]})
    assert status == 1 and started == ["2e-05-2"] and "without a finite accuracy" in capsys.readouterr().out
    status, started = trainer(
        {"1e-05": [80, 81, 82, 80], "2e-05": [90, 89, 90, 88]}, "--keep-checkpoints", seeds=(1, 2, 3, 4)
    )
    assert (status, started) == (0, ["1e-05-4", "2e-05-2", "2e-05-4"]), "more seeds can be added"
    assert found(tmp_path)["best"]["lr"] == 2e-5 and found(tmp_path)["at_edge"]
    kept = {path.parent.name for path in (tmp_path / "out").rglob("checkpoint_last.pt")}
    assert kept == {"lr1e-05-b16-s4", "lr2e-05-b16-s2", "lr2e-05-b16-s4"}
    capsys.readouterr()
    status, started = trainer({"2e-05": [90]}, seeds=(1,))
    assert (status, started) == (0, []) and len(found(tmp_path)["left_out"]) == 7
    assert "The folder has 7 more runs, such as lr1e-05-b16-s1" in (tmp_path / "out" / "results.md").read_text()
    capsys.readouterr()
    status, started = trainer({"1e-05": [80, 81, 82]}, "--dropout", "0.2")
    assert status == 1 and started == []
    assert "was made with dropout = 0.1, and the experiment now says 0.2" in capsys.readouterr().err
    status, started = trainer({"1e-05": [80, 81, 82]}, "--dropout", "0.2", seeds=(7,))
    assert status == 1 and started == [], "its results would stand beside those of other settings"
    assert "out was made with dropout = 0.1, and the experiment now says 0.2" in capsys.readouterr().err
    with Folder(tmp_path / "out").locked():
        pid = subprocess.run([sys.executable, "-c", f"""
from smlp.experiments.folder import Folder
from smlp.errors import UserError
from pathlib import Path
try:
    with Folder(Path({str(tmp_path / 'out')!r})).locked("smlp finetune"):
        print("in")
except UserError as error:
    print(error)
"""], capture_output=True, text=True).stdout  # fmt: skip
        assert "another smlp finetune is running" in pid


def test_a_run_that_ended_without_a_number_is_trained_again(trainer, tmp_path, capsys):
    assert trainer({"1e-05": [80, "nan"]}, "--keep-checkpoints", seeds=(1, 2)) == (1, ["1e-05-1", "1e-05-2"])
    last = tmp_path / "out/runs/lr1e-05-b16-s2/checkpoint_last.pt"
    assert last.is_file(), "for whoever wants to know why"
    assert trainer({"1e-05": [80, None]}, seeds=(1, 2)) == (1, ["1e-05-2"])
    assert not last.is_file(), "training would have nothing to do"
    assert trainer({"1e-05": [80, 81]}, seeds=(1, 2)) == (0, ["1e-05-2"])
    log = last.parent / "train.log"
    log.write_text(log.read_text().replace('"valid_accuracy": 81', '"valid_accuracy": "x"'))
    assert trainer({"1e-05": [80, 82]}, seeds=(1, 2)) == (1, [])
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:1]))
    for _ in range(2):
        capsys.readouterr()
        assert trainer({"1e-05": [80, 82]}, seeds=(1, 2)) == (1, [])
        lost = "failed: lr1e-05-b16-s2: out/runs/lr1e-05-b16-s2/train.log has lost the scores of its last update: "
        said = capsys.readouterr().out
        assert lost + "remove out/runs/lr1e-05-b16-s2 to train it again" in said
        assert "seed 2: its log has no finite scores" in said and found(tmp_path)["best"] is None
        log.unlink(missing_ok=True)
    shutil.rmtree(log.parent)
    assert trainer({"1e-05": [80, 83]}, seeds=(1, 2)) == (0, ["1e-05-2"])


def test_a_stopped_command_starts_nothing_more_and_resumes(trainer, tmp_path, capsys):
    status, started = trainer({"1e-05": ["stop", 81, 82, 83]}, "--jobs", "1", seeds=(1, 2, 3, 4))
    assert (status, started) == (75, ["1e-05-1"])
    assert "stopped by SIGTERM; the same command resumes" in capsys.readouterr().out
    assert found(tmp_path)["points"][0]["runs"]["1"]["state"] == "stopped"
    status, started = trainer({"1e-05": ["stop alone", 81, 82, 83]}, seeds=(1, 2, 3, 4))
    assert status == 1 and len(started) == 4
    assert "failed: lr1e-05-b16-s1: it was stopped, and can be resumed" in capsys.readouterr().out
    status, started = trainer({"1e-05": [80, 81, 82, 83]}, seeds=(1, 2, 3, 4))
    assert (status, started) == (0, ["1e-05-1"])
    assert found(tmp_path)["best"]["medians"]["valid"]["accuracy"]["value"] == 81.5


def test_results_of_something_else_are_not_replaced(trainer, tmp_path, capsys):
    mine = tmp_path / "out" / "results.md"
    mine.parent.mkdir()
    mine.write_text("of the user")
    assert trainer({"1e-05": [80]}, seeds=[1]) == (1, [])
    assert "has a results.md of something else" in capsys.readouterr().err and mine.read_text() == "of the user"
    for damaged in ("{}", '{"made_with": {"lr": 1e-05, "batch_size": 0, "seed": 1}}'):
        (mine.parent / "results.json").write_text(damaged)
        assert trainer({"1e-05": [80]}, seeds=[1]) == (1, []) and mine.read_text() == "of the user"
        assert "results.json is damaged" in capsys.readouterr().err


def test_a_dry_run_starts_nothing(trainer, tmp_path, capsys):
    assert trainer({"1e-05": [80]}, "--dry-run", seeds=[1]) == (0, [])
    said = capsys.readouterr().out
    assert "1 points x 1 seeds = 1 runs; updates: 35 at batch size 16" in said and "lr1e-05-b16-s1: waiting" in said
    assert "smlp train " in said and not (tmp_path / "out").exists()
    assert trainer({"1e-05": [80]}, seeds=[1])[0] == 0
    assert (
        trainer({"1e-05": [80]}, "--dry-run", seeds=[1]) == (0, [])
        and "lr1e-05-b16-s1: done" in capsys.readouterr().out
    )
    for results in (True, False):
        if not results:
            (tmp_path / "out" / "results.json").unlink()
            (tmp_path / "out" / "results.md").unlink()
        assert trainer({"1e-05": [80]}, "--dry-run", "--dropout", "0.2", seeds=[1]) == (1, [])
        assert "was made with dropout = 0.1, and the experiment now says 0.2" in capsys.readouterr().err


def test_the_papers_row_stands_beside_its_architectures(asked, tmp_path, monkeypatch):
    plan = asked()
    results = results_of(plan, Folder(tmp_path / "out"))
    assert results["paper"] is None and results["best"] is None and "gMLP paper" not in page(results)
    next(iter(results["points"][0]["runs"].values())).update(state="done", message=None)  # of a log with NaN
    assert "seed 1: its log has no finite scores of its last update" in page(results)
    facts = {"rows": 10, "labels": {}}
    mnli = write_data(tmp_path / "mnli", task="MNLI", classes=("a", "b", "c"), valid1=facts)
    plan = asked(data=mnli)
    object.__setattr__(plan.encoder, "arch", "amlp_mlm_large")
    assert results_of(plan, Folder(tmp_path / "out"))["paper"] is None, "it has other sizes"
    object.__setattr__(plan.encoder, "overrides", {})
    paper = results_of(plan, Folder(tmp_path / "out"))["paper"]
    assert paper["scores"] == {"valid": 88.4, "valid1": 88.4} and paper["devlin"] == {}
    assert "gMLP paper" not in page(results_of(plan, Folder(tmp_path / "out"))), "there is no run to compare with it"
    object.__setattr__(plan, "data", replace(plan.data, metric="acc_and_f1"))
    assert results_of(plan, Folder(tmp_path / "out"))["paper"] is None, "the paper has another metric"


@pytest.mark.parametrize(
    ("arch", "task", "version_2", "own", "devlin"),
    [
        ("bert_mlm_base", "SST-2", False, "93.8", "92.7"),
        ("bert_mlm_base", "MNLI", False, "85.6 | 85.7", "84.4 | –"),
        ("bert_mlm_base", None, False, "– | 90.2", "– | 88.5"),
        ("bert_mlm_base", None, True, "– | 78.6", "– | 76.3"),
        ("bert_mlm_large", "SST-2", False, "94.3", "93.7"),
        ("bert_mlm_large", "MNLI", False, "87.0 | 87.4", "86.6 | –"),
        ("bert_mlm_large", None, False, "– | 92.0", "– | 90.9"),
        ("bert_mlm_large", None, True, "– | 81.0", "– | 81.8"),
        ("gmlp_mlm_base", "SST-2", False, "94.2", None),
    ],
)
def test_devlins_row_stands_beside_bert(asked, tmp_path, arch, task, version_2, own, devlin):
    """The numbers are those of the paper's Table 6."""
    if task is None:  # SQuAD, whose columns are exact match and F1
        data = write_data(tmp_path / "squad", "squad", valid={"questions": 9, "unanswerable": int(version_2)})
    else:
        more = {"valid1": {"rows": 10, "labels": {}}} if task == "MNLI" else {}
        data = write_data(tmp_path / "data", task=task, classes="abc"[: 2 + len(more)], **more)
    plan = asked(data=data)
    object.__setattr__(plan.encoder, "arch", arch)
    object.__setattr__(plan.encoder, "overrides", {})
    results = results_of(plan, Folder(tmp_path / "out"))
    for subset in plan.data.subsets:  # the page has a column for each that is scored
        scores = {name: vars(Median.of([50.0])) for name in METRICS[plan.data.metric]}
        results["points"][0]["medians"][subset] = scores
    said = page(results)
    assert f"| gMLP paper, Table 6 | – | – | {own} |" in said
    assert (f"| Devlin et al., in the gMLP paper, Table 6 | – | – | {devlin} |" in said) == (devlin is not None)
    assert ("Those of Devlin et al., 2018, which its table repeats, are of" in said) == (devlin is not None)


@pytest.mark.slow
def test_an_encoder_is_fine_tuned_on_real_data(tiny_data, tmp_path, capsys, run_fairseq_many):
    """Two real trainings; the label is the verb of the sentence, so both learn it."""
    args = [
        *(tiny_data, "--user-dir", USER_DIR, "--task", "masked_lm", "--criterion", "masked_lm"),
        *("--arch", "gmlp_mlm_tiny", "--embed-dim", "32", "--ffn-dim", "64", "--num-dense-layers", "2"),
        *("--tokens-per-sample", "32", "--batch-size", "8", "--optimizer", "adam", "--lr", "1e-3", "--max-update", "2"),
        *("--save-dir", tmp_path / "ck", "--no-epoch-checkpoints", "--num-workers", "0"),
    ]
    (run,) = run_fairseq_many([{"tool": "train", "args": args}])
    assert run.rc == 0, run
    encoder = tmp_path / "ck" / "checkpoint_last.pt"
    rows = [f"the s1 {verb} a o{number}\t{label}" for number in range(40) for label, verb in enumerate(("v1", "v2"))]
    (tmp_path / "rows.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    make = ["data", "glue", "--task", "SST-2", "--train", "rows.tsv", "--valid", "rows.tsv", "--out", "sst"]
    with contextlib.chdir(tmp_path):
        assert main([*make, "--tokenizer", str(tiny_data), "--workers", "1", "--quiet"]) == 0
        words = ["finetune", str(encoder), "sst", "--out", "out", "--lr", "1e-2", "--batch-size", "8", "--epochs", "6"]
        words += ["--seeds", "1", "2", "--dropout", "0", "--jobs", "2", "--threads", "1", "--cpu"]
        assert main(words) == 0, capsys.readouterr()
        results = json.loads(Path("out/results.json").read_text())
        assert [results["points"][0]["runs"][seed]["scores"]["valid"]["accuracy"] for seed in "12"] == [100, 100]
        assert "--finetune-from-model" in Path("out/runs/lr0.01-b8-s1/command.txt").read_text()
        before = sorted((path, path.stat().st_mtime_ns) for path in Path("out/runs").rglob("train.log"))
        assert main(words) == 0 and "0 of 2 runs to do" in capsys.readouterr().out
        assert before == sorted((path, path.stat().st_mtime_ns) for path in Path("out/runs").rglob("train.log"))
