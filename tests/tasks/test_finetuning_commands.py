"""Fine-tuning of an encoder from a masked language model, with the commands that ``smlp data`` prints."""

import contextlib
import io
import json
import random
import re
import shlex

import pytest
import torch
from conftest import tiny_sentences
from running import USER_DIR
from squad_data import write_squad

import smlp
from smlp.cli.main import main

pytest.importorskip("torchmetrics")
pytestmark = pytest.mark.long

ARCH = "amlp_mlm_tiny"
NARROW = [
    *("--embed-dim", "16", "--ffn-dim", "32", "--num-dense-layers", "2", "--num-workers", "0", "--seed", "3"),
    *("--log-format", "json", "--log-interval", "1"),
]
# rows of train and of each validation: the last batch of 8 has one row
ROWS, VALID_ROWS = 24, 17
LABELS = {"CoLA": "01", "MRPC": "01", "MNLI": ("contradiction", "neutral", "entailment"), "STS-B": ("0.5", "2", "4.25")}
HEADERS = {
    "MRPC": ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
    "MNLI": ["sentence1", "sentence2", "gold_label"],
    "STS-B": ["sentence1", "sentence2", "score"],
}
METRICS = {"CoLA": "mcc", "MRPC": "acc_and_f1", "MNLI": "accuracy", "STS-B": "pearson_and_spearman"}


def write_rows(path, name, count, seed):
    draw, sentences = random.Random(seed), tiny_sentences(2 * count, seed)
    rows = [HEADERS[name]] if name in HEADERS else []
    for first, second in zip(sentences[::2], sentences[1::2], strict=True):
        label = draw.choice(LABELS[name])
        row = {"CoLA": ["gj04", label, "", first], "MRPC": [label, "1", "2", first, second]}
        rows.append(row.get(name, [first, second, label]))
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")


def printed(*arguments):
    """The command that a step of ``smlp data`` prints, for a narrow model and a few updates."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["data", *map(str, arguments), "--workers", "1", "--quiet"]) == 0
    command = said.getvalue().split("to fine-tune:\n")[1].split("\nglue:")[0].split("\nsquad:")[0]
    return command.replace("\\\n", " ")


@pytest.fixture(scope="module")
def pretrained(tiny_data, tmp_path_factory, run_fairseq_many):
    """A checkpoint of a few updates of the task ``masked_lm``."""
    save_dir = tmp_path_factory.mktemp("pretrained")
    args = [
        *(tiny_data, "--user-dir", USER_DIR, "--task", "masked_lm", "--criterion", "masked_lm", "--arch", ARCH),
        *("--tokens-per-sample", "64", "--batch-size", "8", "--optimizer", "adam", "--lr", "1e-2"),
        *("--max-update", "6", "--save-dir", save_dir, "--no-epoch-checkpoints", *NARROW),
    ]
    (run,) = run_fairseq_many([{"tool": "train", "args": args}])
    assert run.rc == 0, run
    return save_dir / "checkpoint_last.pt"


def case(command, pretrained, save_dir, *more, ranks=1):
    values = {"$(smlp user-dir)": USER_DIR, "ARCH": ARCH, "DIR": str(save_dir), "PRETRAINED.pt": str(pretrained)}
    for name, value in values.items():
        command = re.sub(rf"(?<!\S){re.escape(name)}(?!\S)", lambda _, value=value: value, command)
    args = [*shlex.split(command)[1:], *NARROW, *more]
    return {"tool": "train", "args": args, "ranks": ranks}


def validations(run):
    """What was logged of each validation, by split."""
    assert run.rc == 0, run
    found = {}
    for line in run.stderr.splitlines() + run.stdout.splitlines():
        if match := re.search(r"\| (valid\d*) \| (\{.*\})", line):
            found[match[1]] = {name.removeprefix(f"{match[1]}_"): value for name, value in json.loads(match[2]).items()}
    return found


@pytest.mark.slow
def test_every_metric_of_glue_is_logged_on_any_number_of_ranks(tiny_data, tmp_path, pretrained, run_fairseq_many):
    cases, names = [], []
    for name in LABELS:
        folder = tmp_path / name
        folder.mkdir()
        write_rows(folder / "train.tsv", name, ROWS, 1)
        for seed, file in enumerate(("dev_matched.tsv", "dev_mismatched.tsv") if name == "MNLI" else ("dev.tsv",), 2):
            write_rows(folder / file, name, VALID_ROWS, seed)
        out = tmp_path / f"data-{name}"
        command = printed("glue", "--task", name, "--in", folder, "--tokenizer", tiny_data, "--out", out)
        assert f"--best-checkpoint-metric {METRICS[name]} " in command
        # no step changes the weights: all must agree
        still = ["--batch-size", "8", "--max-update", "2", "--lr", "0", "--max-positions", "32"]
        for ranks in (1, 2):
            save_dir = tmp_path / f"{name}-{ranks}"
            cases.append(case(command, pretrained, save_dir, *still, ranks=ranks))
            names.append((name, ranks))
    logged = dict(zip(names, map(validations, run_fairseq_many(cases, timeout=280)), strict=True))
    again = [case_ | {"args": [*case_["args"], "--max-update", "3"]} for case_ in cases[::2]]
    for one in run_fairseq_many(again, timeout=280):  # the same command goes on where it was
        assert one.rc == 0 and "checkpoint_last.pt (epoch 1 @ 2 updates)" in one.stdout + one.stderr, one.stderr[-2000:]
    for name, metric in METRICS.items():
        assert list(logged[name, 1]) == (["valid", "valid1"] if name == "MNLI" else ["valid"])
        for split, one in logged[name, 1].items():
            assert float(one[metric]) == float(logged[name, 2][split][metric])
            assert float(one["loss"]) == pytest.approx(float(logged[name, 2][split]["loss"]), abs=2e-3)
        loaded = smlp.load_pretrained(tmp_path / f"{name}-1" / "checkpoint_best.pt", tiny_data / "dict.txt")
        scores_BC = loaded.encoder.sentence_heads["sentence_classification_head"](loaded.features(["a cat"]))
        assert scores_BC.shape == (1, 1 if name == "STS-B" else len(LABELS[name]))
        assert (tmp_path / f"{name}-2" / "checkpoint_best.pt").is_file()


@pytest.mark.slow
def test_squad_is_scored_alike_on_any_number_of_ranks_and_afterwards(tiny_data, tmp_path, pretrained, run_fairseq_many):
    files, out = write_squad(tmp_path / "files"), tmp_path / "data"
    command = printed(
        *("squad", "--train", files["v2.0"], "--valid", files["v1.1"], files["v2.0"]),
        *("--tokenizer", tiny_data, "--out", out),
    )
    windows = ["--max-positions", "24", "--doc-stride", "4", "--batch-size", "3"]
    cases = [
        case(
            command, pretrained, tmp_path / str(ranks), *windows, "--max-update", "2", "--total-num-update", "2",
            "--warmup-updates", "0", "--lr", "0",
            "--predictions-file", tmp_path / f"{ranks}-{{subset}}.json", ranks=ranks,
        )
        for ranks in (1, 2)
    ]  # fmt: skip
    one, two = map(validations, run_fairseq_many(cases))
    assert list(one) == list(two) == ["valid", "valid1"]
    for split in one:
        assert {name: one[split][name] for name in ("em", "f1")} == {name: two[split][name] for name in ("em", "f1")}
        first, second = (json.loads((tmp_path / f"{ranks}-{split}.json").read_text()) for ranks in (1, 2))
        assert first == second and len(first) == (5 if split == "valid" else 7)
    assert one["valid1"]["no_answer_threshold"] == two["valid1"]["no_answer_threshold"]
    assert "no_answer_threshold" not in one["valid"]
    args = [
        *(out, "--user-dir", USER_DIR, "--task", "squad", "--criterion", "span", "--valid-subset", "valid1"),
        *("--path", tmp_path / "1" / "checkpoint_best.pt", "--batch-size", "4", "--log-format", "json"),
        *("--predictions-file", tmp_path / "later.json"),
    ]
    (later,) = run_fairseq_many([{"tool": "validate", "args": args}])
    assert float(validations(later)["valid1"]["f1"]) == float(one["valid1"]["f1"])
    assert (tmp_path / "later.json").read_bytes() == (tmp_path / "1-valid1.json").read_bytes()
    loaded = smlp.load_pretrained(tmp_path / "1" / "checkpoint_best.pt")
    spans = loaded.encoder.span_head(loaded.features(["a cat"]))
    assert spans.shape[2] == 2
    export = tmp_path / "export.pt"
    assert main(["checkpoint", "merge", str(tmp_path / "1" / "checkpoint_best.pt"), "--export", "-o", str(export)]) == 0
    exported = smlp.load_pretrained(export)
    assert torch.equal(exported.encoder.span_head(exported.features(["a cat"])), spans)


def test_training_lowers_the_loss_of_spans(tiny_data, tmp_path, pretrained, run_fairseq_many):
    files, out = write_squad(tmp_path / "files"), tmp_path / "data"
    command = printed("squad", "--train", files["v1.1"], "--tokenizer", tiny_data, "--out", out)
    more = ["--max-positions", "64", "--max-update", "30", "--lr", "2e-2", "--warmup-updates", "1", "--dropout", "0"]
    (run,) = run_fairseq_many([case(command, pretrained, tmp_path / "save", *more)])
    assert run.rc == 0, run
    losses = [float(loss) for loss in re.findall(r'"loss": "([\d.]+)"', run.stderr + run.stdout)]
    assert len(losses) >= 30 and losses[29] < 0.7 * losses[0]


@pytest.mark.slow
def test_a_model_without_a_head_for_spans_is_refused_in_one_sentence(tiny_data, tmp_path, run_fairseq_many):
    files, out = write_squad(tmp_path / "files"), tmp_path / "data"
    printed("squad", "--train", files["v1.1"], "--tokenizer", tiny_data, "--out", out)
    common = [out, "--user-dir", USER_DIR, "--task", "squad", "--criterion", "span", "--batch-size", "2"]
    cases = [
        {
            "tool": "train",
            "args": [*common, "--arch", arch, "--optimizer", "adam", "--lr", "0", "--save-dir", tmp_path / arch],
        }
        for arch in ("roberta_base", "smlp_tiny")
    ]
    for run, arch in zip(run_fairseq_many(cases), ("roberta_base", "smlp_tiny"), strict=True):
        assert run.rc == 1 and arch in run.errors[-1] and "Traceback" not in run.stderr, run
