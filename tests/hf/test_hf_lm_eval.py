"""lm-evaluation-harness gives an exported model the numbers of its checkpoint, through ``--model hf`` and ``smlp``."""

import json
import os
import random

os.environ["HF_HUB_OFFLINE"] = "1"  # before the harness is imported

import pytest
from lm_eval.api.instance import Instance
from running import run_python
from tiny_checkpoints import write_checkpoint

import smlp.hf  # noqa: F401  # the model's classes
from smlp.cli.main import main
from smlp.errors import UserError
from smlp.evaluation.lm_eval.model import HarnessModel

# isort: split
import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

WORDS = [f"w{number}" for number in range(30)]


def request(kind, *arguments, number=0):
    return Instance(kind, {}, arguments, number, metadata=("mine", number, 1))


def text(length, seed):
    return " ".join(random.Random(seed).choices(WORDS, k=length))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of a model with a context of 24 tokens, and its folder."""
    folder = tmp_path_factory.mktemp("model")
    path, _ = write_checkpoint(folder / "ours", WORDS, "smlp_tiny", 24)
    assert main(["export", str(path), str(folder / "hf"), "--hf"]) == 0
    return path, folder / "hf"


def test_requests_are_answered_alike(checkpoint):
    """Also those that are too long, each by one token more, and those with white space at the end of their context."""
    path, folder = checkpoint
    ours, theirs = HarnessModel(path), HFLM(str(folder), batch_size=3, device="cpu")
    pairs = [(text(3, 1), " w3 w4"), (text(3, 1) + " ", "w7"), ("w5\n", "w6 w7"), ("w5 \n\n ", "w6"), ("", "w1 w2")]
    pairs += [(text(length, length), " w1 w2 w3") for length in (20, 21, 22, 40)]
    asked = [request("loglikelihood", *pair, number=number // 2) for number, pair in enumerate(pairs)]
    found, want = (model.loglikelihood(asked, disable_tqdm=True) for model in (ours, theirs))
    assert [value for value, _ in found] == pytest.approx([value for value, _ in want], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in want]
    assert ours.num_truncated == 2  # of 5 records
    # the harness puts two start symbols before a rolling text where a tokenizer writes one
    without = HFLM(str(folder), batch_size=3, device="cpu", add_bos_token=False)
    rolling = [request("loglikelihood_rolling", text(length, length)) for length in (5, 24, 25, 60)]
    found, want = (model.loglikelihood_rolling(rolling, disable_tqdm=True) for model in (ours, without))
    assert found == pytest.approx(want, abs=1e-4)
    settings = {"until": ["w9", "\n"], "max_gen_toks": 8, "do_sample": False}
    prompts = [request("generate_until", text(length, length), settings) for length in (2, 14, 15, 16, 17, 30)]
    found, want = (model.generate_until(prompts, disable_tqdm=True) for model in (ours, theirs))
    assert [answer.split() for answer in found] == [answer.split() for answer in want]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A folder with a task of one's own."""
    folder = tmp_path_factory.mktemp("task")
    rows = [{"context": text(12, row), "choices": [f" {word}" for word in WORDS[row : row + 4]]} for row in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    definition = {
        "task": "mine", "dataset_path": "json", "output_type": "multiple_choice", "validation_split": "validation",
        "dataset_kwargs": {"data_files": {"validation": str(folder / "rows.jsonl")}, "cache_dir": str(folder)},
        "doc_to_text": "context", "doc_to_choice": "choices", "doc_to_target": 1, "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    (folder / "mine.yaml").write_text(json.dumps(definition))
    return folder


def test_the_harness_gives_the_export_the_same_results(checkpoint, task):
    path, folder = checkpoint
    shared = {"tasks": ["mine"], "task_manager": TaskManager(include_path=str(task), include_defaults=False)}
    found = lm_eval.simple_evaluate("smlp", model_args={"path": str(path)}, **shared, device="cpu")
    want = lm_eval.simple_evaluate("hf", model_args={"pretrained": str(folder)}, **shared, device="cpu")
    for name in ("acc,none", "acc_stderr,none"):
        assert found["results"]["mine"][name] == want["results"]["mine"][name]
    for ours, theirs in zip(found["samples"]["mine"], want["samples"]["mine"], strict=True):
        values = [[value for value, _ in sample["filtered_resps"]] for sample in (ours, theirs)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)
    with pytest.raises(UserError, match="--model_args has 'banana', which is not one of path, batch_tokens"):
        lm_eval.simple_evaluate("smlp", model_args={"path": str(path), "banana": 1}, **shared)


@pytest.mark.slow
def test_the_harness_command_line_knows_the_model(checkpoint, task, tmp_path):
    """It reads thousands of files of tasks first."""
    words = ["run", "--model", "smlp", "--model_args", f"path={checkpoint[0]}", "--tasks", "mine"]
    done = run_python(
        *("-m", "smlp.evaluation.lm_eval", *words, "--include_path", task, "--output_path", tmp_path / "results.json"),
        timeout=200,
    )
    assert done.rc == 0, done.stderr
    (report,) = tmp_path.glob("results*.json")
    assert 0 <= json.loads(report.read_text())["results"]["mine"]["acc,none"] <= 1
