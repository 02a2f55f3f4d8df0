"""``smlp compare run`` on tiny models: runs of which one fails, scores, speed, and a second call."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder
from running import run_python
from zeroshot_data import write_tasks

from data_prep.tokenize.models import train_byte_level
from smlp.cli.main import main
from smlp.errors import UserError
from smlp.evaluation.report import tokens_of
from smlp.experiments.data import data_of, describe
from smlp.experiments.folder import Folder
from smlp.experiments.reading import read_experiment
from smlp.text.tokenizer import Tokenizer, Vocabulary
from smlp.text.tokenizer_files import find_tokenizer

MODEL = "embed_dim: 16, ffn_dim: 32, num_dense_layers: 1"
FILE = f"""
data: DATA
tokens_per_sample: 24
batch_size: 4
updates: 6
seeds: [1]
log_interval: 2
recipe: {{optimizer: adam, lr: 2.0e-3, clip_norm: 1.0, dropout: 0, num_workers: 0}}
models:
  gMLP: {{arch: gmlp_lm_tiny, {MODEL}}}
  partial: {{arch: smlp_partial_tiny, {MODEL}, num_sparse_layers: 1, num_experts: 2}}
  broken: {{arch: gmlp_lm_tiny, {MODEL}, recipe: {{finetune_from_model: missing.pt}}}}
max_spread: 9
evaluate: {{validations: 2, speed_rounds: 2}}
run: {{jobs: 2, threads: 1, device: cpu}}
"""
BF16 = "evaluate: {validations: 2, speed_rounds: 2, dtype: bf16}"


@pytest.fixture(scope="module")
def experiment(tiny_data, tmp_path_factory):
    """The file, its folder, and what the first and the second call came to."""
    folder = tmp_path_factory.mktemp("compare")
    path, out = folder / "tiny.yaml", folder / "out"
    path.write_text(FILE.replace("DATA", str(tiny_data)))
    first = run_python("-m", "smlp", "compare", "run", path, "--out", out, timeout=200)
    before = {file: file.stat().st_mtime_ns for file in (out / "runs").glob("*/checkpoint_last.pt")}
    assert (out / "experiment.yaml").read_text() == path.read_text()
    shutil.copy(out / "runs" / "gMLP-s1" / "scores.json", folder)
    text = re.sub(r"  broken:.*\n", "", path.read_text())
    path.write_text(text.replace("seeds: [1]", "seeds: [2, 3]\nquick: {seeds: [1], title: again, " + BF16 + "}"))
    second = run_python("-m", "smlp", "compare", "run", path, "--quick", "--out", out, timeout=200)
    after = {file: file.stat().st_mtime_ns for file in (out / "runs").glob("*/checkpoint_last.pt")}
    return path, out, first, second, before == after


def test_words_and_bytes_of_the_text(tmp_path):
    lines = ["the old man and the sea", "über dem Café"]
    for name, content in train_byte_level(lines * 5, 290).items():
        (tmp_path / name).write_bytes(content)
    symbols = len(json.loads((tmp_path / "encoder.json").read_text()))
    (tmp_path / "dict.txt").write_text("".join(f"{symbol} 1\n" for symbol in range(symbols)))
    text = tokens_of(lines, Tokenizer(Vocabulary.load(tmp_path / "dict.txt"), find_tokenizer([tmp_path])))
    for split in ("train", "valid"):
        builder = MMapIndexedDatasetBuilder(str(tmp_path / f"{split}.bin"))
        builder.add_item(torch.from_numpy(text.tokens))
        builder.finalize(str(tmp_path / f"{split}.idx"))
    found = describe(str(tmp_path), ("valid",))["splits"]["valid"]
    assert (found["words"], found["bytes"]) == (9, sum(len(line.encode()) + 1 for line in lines))


def read(path):
    return json.loads(path.read_text())


def compare(*words):
    return main(["compare", *map(str, words)])


def test_one_failure_stops_nothing_else(experiment):
    _, out, first, _, _ = experiment
    assert first.rc == 1, first.stderr
    assert "failed: broken-s1: train failed with status 1: " in first.stdout
    assert "missing.pt" in first.stdout
    states = {path.parent.name: read(path)["state"] for path in out.glob("runs/*/run.json")}
    assert states == {"gMLP-s1": "done", "partial-s1": "done", "broken-s1": "failed"}


def test_scores_are_of_the_same_positions(experiment):
    _, out, *_ = experiment
    gmlp, partial = (read(out / "runs" / f"{name}-s1" / "scores.json") for name in ("gMLP", "partial"))
    assert gmlp["prefix"] == partial["prefix"] == 5, "20 % of 24"
    assert partial["subsets"]["valid"]["nll_all"] is None
    assert gmlp["subsets"]["valid"]["nll_all"] != gmlp["subsets"]["valid"]["nll_after_prefix"]
    assert gmlp["num_updates"] == 6


def test_scores_in_another_precision_are_made_anew(experiment):
    path, out, *_ = experiment
    exact, half = (read(file) for file in (path.parent / "scores.json", out / "runs" / "gMLP-s1" / "scores.json"))
    assert (exact["dtype"], half["dtype"]) == ("fp32", "bf16")
    values = [scores["subsets"]["valid"]["nll_all"] for scores in (exact, half)]
    assert values[0] != values[1] == pytest.approx(values[0], abs=1e-2)


def test_what_a_third_person_needs(experiment):
    path, out, *_ = experiment
    found = read(out / "experiment.json")
    assert [model["name"] for model in found["models"]] == ["gMLP", "partial"]
    assert found["tokens"] == 6 * 4 * 24
    environment = read(out / "environment.json")
    assert environment["python"].startswith("3.")
    assert {"torch", "fairseq", "processor", "git"} <= set(environment)
    data = read(out / "data.json")
    assert data["splits"]["train"]["tokens"] > 0
    assert len(data["splits"]["valid"]["sha256"]) == 64
    run = out / "runs" / "gMLP-s1"
    assert " -m smlp train " in (run / "command.txt").read_text()
    orders = [(out / "runs" / f"{name}-s1" / "data_order.jsonl").read_text() for name in ("gMLP", "partial")]
    assert orders[0] == orders[1]
    assert len(orders[0].splitlines()) == 6
    assert len((run / "update_times.jsonl").read_text().splitlines()) == 6
    settings = yaml.safe_load(path.read_text())
    assert yaml.safe_load((out / "experiment.yaml").read_text()) == settings | settings.pop("quick")


def test_speed_is_measured_in_turn(experiment):
    _, out, *_ = experiment
    speed = read(out / "speed.json")
    assert all(len(model["seconds_per_update"]) == 2 for model in speed["models"].values())


def test_a_second_call_does_what_is_left(experiment):
    _, _, _, second, is_untouched = experiment
    assert second.rc == 0, second.stdout + second.stderr
    assert is_untouched
    assert "2 of 2 runs are done" in second.stdout


def test_the_settings_of_a_folder_are_fixed(experiment, capsys):
    _, out, *_ = experiment
    assert compare("run", out, "--quick") == 1
    assert capsys.readouterr().err.endswith(
        f"{out} is the folder of the runs, whose settings are fixed: leave --quick out\n"
    )


def test_status(experiment, tmp_path):
    path, out, *_ = experiment
    assert compare("status", path, "--out", out, "--json", out / "status.json") == 0
    rows = read(out / "status.json")
    assert [(row["run"], row["state"], row["num_updates"]) for row in rows] == [
        ("runs/gMLP-s1", "done", 6),
        ("runs/partial-s1", "done", 6),
    ]
    assert rows[0]["valid"] > 1
    shutil.copytree(out, tmp_path / "copy")
    log = tmp_path / "copy" / "runs" / "gMLP-s1" / "train.log"
    log.write_text(log.read_text().split('"num_updates"')[0])  # a run that failed before its first line
    assert compare("status", tmp_path / "copy", "--json", out / "status.json") == 0
    assert read(out / "status.json")[0]["num_updates"] == 6, "from the record of the data's order"


def test_changed_settings_are_refused(experiment, tmp_path, capsys):
    path, out, *_ = experiment
    other = tmp_path / "other.yaml"
    recorded = [out / name for name in ("experiment.json", "experiment.yaml", "data.json")]
    before = [file.read_bytes() for file in recorded]
    for old, new, message in (
        ("updates: 6", "updates: 8", "was made with updates = 6, and the experiment now says 8: give another --out"),
        ("lr: 2.0e-3", "lr: 3.0e-3", "gMLP-s1 was made with lr = 0.002, and the experiment now says 0.003"),
        ("batch_size: 4", "batch_size: 2", "was made with tokens_per_update"),
        (
            "  gMLP:",
            '  "gMLP.":',
            "gMLP-s1 was made with model = gMLP, and the experiment now says gMLP.: give",
        ),
    ):
        assert old in path.read_text()
        other.write_text(path.read_text().replace(old, new))
        for dry in ([], ["--dry-run"]):
            assert compare("run", other, "--quick", "--out", out, *dry) == 1
            assert message in capsys.readouterr().err
        assert [file.read_bytes() for file in recorded] == before


def test_numbers_that_are_spelled_otherwise_are_the_same(experiment, tmp_path):
    """YAML reads 2e-3, without a point, as a text."""
    path, out, *_ = experiment
    other = tmp_path / "other.yaml"
    other.write_text(path.read_text().replace("lr: 2.0e-3", "lr: 2e-3"))
    assert compare("run", other, "--quick", "--out", out) == 0


def test_other_held_out_text_is_refused(experiment, tiny_data, tmp_path, capsys):
    path, out, *_ = experiment
    shutil.copytree(tiny_data, tmp_path / "bin")
    for ending in ("bin", "idx"):
        shutil.copy(tiny_data / f"test.{ending}", tmp_path / "bin" / f"valid.{ending}")
    other = tmp_path / "other.yaml"
    other.write_text(path.read_text().replace(str(tiny_data), str(tmp_path / "bin")))
    assert compare("run", other, "--quick", "--out", out) == 1
    assert "was made with the sha256 of valid = " in capsys.readouterr().err
    shutil.copytree(tiny_data, tmp_path / "bin", dirs_exist_ok=True)
    lines = (tiny_data / "dict.txt").read_text().splitlines()
    (tmp_path / "bin" / "dict.txt").write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n")
    assert compare("run", other, "--quick", "--out", out) == 1
    assert "was made with the sha256 of dict.txt = " in capsys.readouterr().err


def test_dry_run_says_what_is_left(experiment, capsys):
    _, out, *_ = experiment
    for place in (out, out / "experiment.yaml"):
        assert compare("run", place, "--dry-run") == 0
        said = capsys.readouterr().out
        assert "2 of 2 runs are done already\n" in said and "\n0 runs: about 0 s" in said


def test_dry_run_trains_nothing(experiment, tmp_path, capsys):
    path, *_ = experiment
    other = tmp_path / "other.yaml"
    other.write_text(path.read_text().replace("{arch: gmlp_lm_tiny,", "{arch: gmlp_lm_tiny, num_experts: 4,"))
    assert compare("run", other, "--out", tmp_path / "dry", "--dry-run") == 0
    said = capsys.readouterr().out
    assert "\ngMLP: num_experts has no effect: the model has no sparse layers\n" in said
    assert re.search(r"4 runs: about \d+ s with 2 at a time", said)
    assert "smlp train" in said
    assert not (tmp_path / "dry").exists()


MISTAKES = {
    "text": ("data: DATA", "text: {files: [nope.txt], vocab_size: 64}", "there is no text file nope.txt"),
    "subset": (
        "validations: 2",
        "validations: 2, subsets: [valid, nope]",
        r"evaluate.subsets has 'nope', and .* no nope.idx",
    ),
    "order of subsets": (
        "validations: 2",
        "validations: 2, subsets: [test, valid]",
        r"evaluate.subsets must begin with valid, .* got \['test', 'valid'\]",
    ),
    "option": (
        "validations: 2",
        "validations: 2, zeroshot: {data: tasks, limt: 3}",
        r"other.yaml: evaluate.zeroshot: unrecognized arguments: --limt 3",
    ),
    "value": (
        "validations: 2",
        "validations: 2, zeroshot: {data: tasks, limit: 0}",
        r"other.yaml: evaluate.zeroshot: --limit must be at least 1, got 0",
    ),
    "checkpoint": (
        "validations: 2",
        "validations: 2, zeroshot: {data: tasks, pat: other.pt}",
        r"other.yaml: evaluate.zeroshot: path may not be given: each run has its own",
    ),
    "help": (
        "validations: 2",
        "validations: 2, zeroshot: {data: tasks, help: true}",
        r"other.yaml: evaluate.zeroshot: unrecognized arguments: --help",
    ),
    "unknown option of tasks that is off": (
        "validations: 2",
        "validations: 2, zeroshot: {data: tasks, skip_to_long: no}",
        r"other.yaml: evaluate.zeroshot: unrecognized arguments: --skip-to-long",
    ),
    "limit that is off": (
        "validations: 2",
        "validations: 2, zeroshot: {data: tasks, limit: no}",
        r"other.yaml: evaluate.zeroshot: --limit takes a value, not false",
    ),
    "unknown and off": ("recipe: {f", "recipe: {bfl6: no, f", "model broken: unrecognized arguments: --bfl6"),
    "unknown and empty": ("recipe: {f", "recipe: {bfl6: , f", "model broken: unrecognized arguments: --bfl6"),
    "betas": (
        "optimizer: adam",
        "optimizer: adam, adam_betas: (0.9",
        r"--adam-betas must be two numbers .*, got '\(0.9'",
    ),
    "off": (
        "optimizer: adam",
        "optimizer: adam, bf16: off, attention_dropout: off",
        "model .*: --attention-dropout takes a value, not false",
    ),
    "off in the grid": (
        "max_spread: 9",
        "max_spread: 9\ntune: {weight_decay: [off, 0.1], updates: 3}",
        "model .*: --weight-decay takes a value, not false",
    ),
}


def dry_run(path, out):
    return main(["compare", "run", str(path), "--out", str(out), "--dry-run"])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_dry_run_finds_mistakes_that_would_cost_a_training(mistake, tiny_data, tmp_path, capsys):
    before, after, message = MISTAKES[mistake]
    path = tmp_path / "other.yaml"
    path.write_text(FILE.replace(before, after).replace("DATA", str(tiny_data)))
    assert dry_run(path, tmp_path / "out") == 1
    assert re.search(message, capsys.readouterr().err)


def test_the_optimizer_is_that_of_smlp_train(tiny_data, tmp_path, capsys):
    path = tmp_path / "other.yaml"
    assert "optimizer: adam" in FILE
    path.write_text(FILE.replace("optimizer: adam", "weight_decay: 0.1").replace("DATA", str(tiny_data)))
    assert dry_run(path, tmp_path / "out") == 0, capsys.readouterr().err


def test_files_of_tasks_are_read_before_the_first_training(tiny_data, tmp_path, capsys):
    path, tasks = tmp_path / "other.yaml", write_tasks(tmp_path / "tasks", count=2)
    (tasks / "copa" / "val.jsonl").write_text("{}\n")
    (tasks / "piqa" / "valid.jsonl").unlink()
    wanted = f"validations: 2, zeroshot: {{data: {tasks}, tasks: [copa, piqa, winogrande]}}"
    path.write_text(FILE.replace("DATA", str(tiny_data)).replace("validations: 2", wanted))
    assert main(["compare", "run", str(path), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "other.yaml: evaluate.zeroshot: 2 of 3 tasks cannot be scored" in said
    assert "copa/val.jsonl" in said and "piqa" in said
    assert not (tmp_path / "out" / "runs").exists()


def test_a_file_of_the_user_is_not_replaced(tiny_data, tmp_path, capsys):
    content = FILE.replace("DATA", str(tiny_data))
    mine, other = tmp_path / "out" / "experiment.yaml", tmp_path / "other.yaml"
    mine.parent.mkdir()
    mine.write_text(f"# of mine\n{content}quick: {{seeds: [1]}}\n")
    other.write_text(content)
    for words in ([mine, "--quick"], [other]):
        assert main(["compare", "run", *map(str, words), "--out", str(mine.parent)]) == 1
        assert f"{mine} is yours and would be replaced: give another --out" in capsys.readouterr().err
    assert mine.read_text().startswith("# of mine")


def test_a_dry_run_names_the_data_that_there_will_be(tmp_path, capsys):
    path, text = tmp_path / "other.yaml", tmp_path / "some.txt"
    text.write_text("some text\n")
    path.write_text(FILE.replace("data: DATA", f"text: {{files: [{text}], vocab_size: 64}}"))
    assert dry_run(path, tmp_path / "out") == 0
    assert f"smlp train {tmp_path}/out/data --task" in capsys.readouterr().out
    later = FILE.replace("DATA", f"{tmp_path}/later\nvocab_size: 64")
    path.write_text(later.replace("validations: 2", f"validations: 2, zeroshot: {{data: {tmp_path}/tasks}}"))
    assert dry_run(path, tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert f"smlp train {tmp_path}/later --task" in shown
    assert f"no tasks yet: there is no folder {tmp_path}/tasks (evaluate.zeroshot.data)" in shown


def test_a_text_that_nothing_could_be_made_of_may_be_mended(tmp_path, capsys):
    path, text = tmp_path / "other.yaml", tmp_path / "some.txt"
    text.write_text("")
    path.write_text(FILE.replace("data: DATA", f"text: {{files: [{text}], vocab_size: 64}}"))
    words = ["compare", "run", str(path), "--out", str(tmp_path / "out")]
    assert main(words) == 1
    assert "some.txt is empty" in capsys.readouterr().err
    text.write_text("two\n")  # still too short, which is found out later
    assert main(words) == 1
    assert "were made with" not in capsys.readouterr().err


def test_paths_that_begin_with_a_dash_are_no_options_of_the_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("-some.txt").write_text("some text\n" * 30)
    Path("-out").mkdir()
    steps = {}
    monkeypatch.setattr("smlp.experiments.data.run_logged", lambda name, words, log: steps.update({name: words}))
    path = tmp_path / "other.yaml"
    path.write_text(FILE.replace("data: DATA", "text: {files: [-some.txt], vocab_size: 64}"))
    assert main(["compare", "run", str(path), "--out=-out", "--dry-run"]) == 0
    with pytest.raises(UserError, match="manifest"):  # the steps made nothing
        data_of(read_experiment(path), Folder(Path("-out")))
    assert list(steps) == ["text", "vocabulary", "binarize"]
    given = [word for words in steps.values() for word in words if "-some" in word or "-out/" in word]
    assert len(given) == 7 and all(word.startswith("./-") for word in given)


def test_data_that_were_made_from_other_text_are_refused_without_the_text(tmp_path, monkeypatch, capsys):
    """As after the folder text was removed to save space."""

    def make(text, folder):
        for name in ("text", "data"):
            (folder / name).mkdir(parents=True)
            (folder / name / "manifest.json").write_text("{}")

    monkeypatch.setattr("smlp.experiments.data._make", make)
    path, folder = tmp_path / "other.yaml", Folder(tmp_path / "out")
    (tmp_path / "some.txt").write_text("some text\n")
    text = FILE.replace("data: DATA", f"text: {{files: [{tmp_path}/some.txt], vocab_size: 64}}")
    path.write_text(text)
    folder.path.mkdir()
    data_of(read_experiment(path), folder)
    shutil.rmtree(folder.path / "text")
    assert data_of(read_experiment(path), folder) == str(folder.path / "data")
    path.write_text(text.replace("vocab_size: 64", "vocab_size: 72"))
    said = "were made with text.vocab_size = 64, not 72: give another --out"
    with pytest.raises(UserError, match=said):
        data_of(read_experiment(path), folder)
    assert dry_run(path, folder.path) == 1 and said in capsys.readouterr().err


def test_pieces_without_their_tokenizer_are_refused_before_the_first_training(tiny_data, tmp_path, capsys):
    data, path = tmp_path / "data", tmp_path / "other.yaml"
    shutil.copytree(tiny_data, data, ignore=shutil.ignore_patterns("sentencepiece.model", "manifest.json"))
    lines = (data / "dict.txt").read_text().splitlines()
    (data / "dict.txt").write_text("\n".join(["\u2581of 1", *lines[1:]]) + "\n")
    path.write_text(FILE.replace("DATA", str(data)))
    assert dry_run(path, tmp_path / "out") == 1
    assert "the dictionary holds SentencePiece pieces but there is no sentencepiece.model" in capsys.readouterr().err
