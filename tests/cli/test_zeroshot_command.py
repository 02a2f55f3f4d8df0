"""``smlp zeroshot`` on small files of all six tasks, against forward passes and rules written out here."""

import argparse
import json
import math
import re
import resource
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from running import run_python
from tiny_checkpoints import write_checkpoint
from tiny_decoders import make
from zeroshot_data import WORDS, write_tasks

from smlp.cli import progress
from smlp.cli.main import main
from smlp.cli.zeroshot import _SCORING, _TASKS, _TEMPLATES, _kept_scores
from smlp.errors import UserError
from smlp.evaluation.zeroshot.partial import PartialScores
from smlp.evaluation.zeroshot.readers import READERS
from smlp.evaluation.zeroshot.report import TABLE_6
from smlp.evaluation.zeroshot.rules import RULES
from smlp.evaluation.zeroshot.templates import TEMPLATES
from smlp.inference.scoring.candidates import CandidateScorer
from smlp.launch.team import Team
from smlp.text.tokenizer import NEWLINES, Vocabulary

SYMBOLS = [*WORDS, ".", "because", "so", ",", "w1:"]
CONTEXT = 40


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), SYMBOLS, max_tokens=CONTEXT)


@pytest.fixture(scope="module")
def partial(tmp_path_factory):
    folder = tmp_path_factory.mktemp("partial")
    return write_checkpoint(folder, SYMBOLS, "smlp_partial_tiny", CONTEXT, prefix_fraction=0.4)


def zeroshot(path, data, *more):
    return main(["zeroshot", "--path", str(path), "--data-dir", str(data), "--device", "cpu", *map(str, more)])


def results(tmp_path, path, data, *more):
    """The report, and what was written for each record."""
    output, report = tmp_path / "answers.jsonl", tmp_path / "report.json"
    assert zeroshot(path, data, "--output", output, "--json", report, *more) == 0
    return json.loads(report.read_text()), [json.loads(line) for line in output.read_text().splitlines()]


def ids_of(text):
    vocabulary = Vocabulary(SYMBOLS)
    ids = []
    for number, line in enumerate(text.split("\n")):
        ids += [vocabulary.eos] * (number > 0)
        ids += [vocabulary.index.get(word, vocabulary.unk) for word in line.split()]
    return ids


@torch.no_grad()
def log_probs(decoder, ids, num_starts=1):
    inputs = torch.tensor([[2] * num_starts + ids[:-1]])
    table = decoder(inputs).logits[0].log_softmax(1)
    return [float(table[num_starts - 1 + place, token]) for place, token in enumerate(ids)]


def headline_score(task, number, texts, values):
    """Mean after the beginning that all share; for Winogrande the sum over the shared end."""
    if task == "winogrande":
        shared = 0
        while len({text[len(text) - shared - 1] for text in texts}) == 1:
            shared += 1
        return sum(values[number][len(texts[number]) - shared :])
    shared = 0
    while len({text[shared] for text in texts}) == 1:
        shared += 1
    return sum(values[number][shared:]) / (len(texts[number]) - shared)


def test_the_report_is_what_plain_forward_passes_say(model, data, tmp_path, capsys):
    path, decoder = model
    report, rows = results(tmp_path, path, data, "--tasks", "all", "--batch-tokens", 100)
    right = {task: [] for task in _TASKS}
    for row in rows:
        texts = [ids_of(row["prompt"] + candidate["text"]) for candidate in row["candidates"]]
        assert row["prefix"] == "</s>" and row["num_cut_tokens"] == row["num_filled"] == 0
        values = [log_probs(decoder, text) for text in texts]
        scores = [headline_score(row["task"], number, texts, values) for number in range(len(texts))]
        for candidate, text, value, score in zip(row["candidates"], texts, values, scores, strict=True):
            assert candidate["num_tokens"] == len(text)
            assert candidate["log_probs"] == pytest.approx(value[-len(candidate["log_probs"]) :], abs=1e-5)
            assert candidate["scored_tokens"][-1] == Vocabulary(SYMBOLS).symbols[text[-1]]
            assert candidate["scores"][row["rule"]] == pytest.approx(score, abs=1e-5)
            assert candidate["scores"]["sum"] == pytest.approx(sum(candidate["log_probs"]), abs=1e-4)
        assert row["choice"] == scores.index(max(scores))
        assert row["is_right"] == (row["choice"] in row["gold"])
        right[row["task"]].append(row["is_right"])
    assert [len(values) for values in right.values()] == [6] * 6
    for task, values in right.items():
        summary, share = report["tasks"][task], sum(values) / 6
        assert summary["accuracy"] == pytest.approx(share) and summary["n"] == 6
        assert summary["standard_error"] == pytest.approx(math.sqrt(share * (1 - share) / 5))
        assert summary["wilson_95"][0] < share < summary["wilson_95"][1] or share in (0, 1)
        assert summary["accuracy_by_rule"][summary["rule"]] == summary["accuracy"]
    assert report["average"] == pytest.approx(sum(one["accuracy"] for one in report["tasks"].values()) / 6)
    assert {task: one["chance"] for task, one in report["tasks"].items()} == pytest.approx(
        {"copa": 0.5, "piqa": 0.5, "storycloze": 0.5, "winogrande": 0.5, "hellaswag": 0.25, "record": 1 / 3}
    )
    assert report["tasks"]["copa"]["majority"] == 0.5 and report["tasks"]["record"]["majority"] is None
    assert report["tasks"]["record"]["exact_match"] == report["tasks"]["record"]["accuracy"]
    assert report["tasks"]["piqa"]["unknown_share"] > 0 == report["tasks"]["storycloze"]["unknown_share"]
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("HellaSwag", "average", "95 % interval", "prefix </s>", "newline eos"))


@pytest.mark.slow
def test_ranks_write_the_same_files(model, data, tmp_path):
    path, _ = model
    command = ["--tasks", "copa,record", "--batch-tokens", "60"]
    report, rows = results(tmp_path, path, data, *command)
    files = ["--output", tmp_path / "two.jsonl", "--json", tmp_path / "two.json"]
    words = ["-m", "smlp", "zeroshot", "--path", path, "--data-dir", data, "--device", "cpu", *command, *files]
    done = run_python(*words, "--nproc", "2")
    assert done.rc == 0, done.stderr
    assert done.stdout.count("average") == 1 and "[rank 1]" not in done.stdout
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "answers.jsonl").read_bytes()
    assert json.loads((tmp_path / "two.json").read_text()) == report and len(rows) == 12


def test_half_precision(model, data, tmp_path):
    exact, half = (
        [
            candidate["scores"]["sum"]
            for row in results(tmp_path, model[0], data, *words)[1]
            for candidate in row["candidates"]
        ]
        for words in (["--tasks", "copa", "--dtype", dtype] for dtype in ("fp32", "bf16"))
    )
    assert half != exact and half == pytest.approx(exact, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "num_ranks"), [("smlp_tiny", 4), ("gmlp_moe_tiny", 2)])
def test_ranks_share_the_experts(arch, num_ranks, data, tmp_path):
    """Batches are others, so numbers agree up to rounding; a rank without a batch has experts for the others."""
    path, _ = write_checkpoint(tmp_path / "model", SYMBOLS, arch, CONTEXT, num_experts=num_ranks)
    command = ["--tasks", "copa,record", "--batch-tokens", "300", "--scoring", "unconditional"]
    report, rows = results(tmp_path, path, data, *command)
    files = ["--output", tmp_path / "spread.jsonl", "--json", tmp_path / "spread.json"]
    words = ["-m", "smlp", "zeroshot", "--path", path, "--data-dir", data, "--device", "cpu", *command, *files]
    done = run_python(*words, "--nproc", num_ranks, "--spread-experts")
    assert done.rc == 0, done.stderr
    spread = json.loads((tmp_path / "spread.json").read_text())
    assert spread["settings"]["spread_experts"] and spread["tasks"].keys() == report["tasks"].keys()
    assert spread["average"] == report["average"]
    for line, row in zip((tmp_path / "spread.jsonl").read_text().splitlines(), rows, strict=True):
        for theirs, ours in zip(json.loads(line)["candidates"], row["candidates"], strict=True):
            common = min(len(theirs["log_probs"]), len(ours["log_probs"]))
            assert theirs["log_probs"][-common:] == pytest.approx(ours["log_probs"][-common:], abs=1e-5)


class Stopped:
    """Ctrl-C after a number of batches; counts those that are scored."""

    def __init__(self, monkeypatch, after=None):
        self.num_scored, score = 0, CandidateScorer.score

        def count(scorer, groups, batch):
            if self.num_scored == after:
                raise KeyboardInterrupt
            self.num_scored += 1
            return score(scorer, groups, batch)

        monkeypatch.setattr(CandidateScorer, "score", count)


@pytest.mark.parametrize("scoring", ["auto", "unconditional"])
def test_a_run_that_was_stopped_is_resumed_where_it_was(model, data, tmp_path, capsys, monkeypatch, scoring):
    """No older file passes for its result, and what it writes in the end is what it would have written at once."""
    command = ["--tasks", "copa,record", "--batch-tokens", "20", "--scoring", scoring]
    once = tmp_path / "once"
    once.mkdir()
    report, _ = results(once, model[0], data, *command)
    files = output, new_report = tmp_path / "answers.jsonl", tmp_path / "report.json"
    for file in files:
        file.write_text("{}\n")
    command += ["--output", output, "--json", new_report]
    with monkeypatch.context() as patch:
        first = Stopped(patch, after=7)
        assert zeroshot(model[0], data, *command) == 130
    assert not output.exists() and not new_report.exists()
    partial = tmp_path / "answers.jsonl.partial"
    lines = partial.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + first.num_scored == 8 and json.loads(lines[0])["batch_tokens"] == 20
    partial.write_bytes(b"".join(lines[:-1]) + lines[-1][:-9])  # as a machine that went down may leave it
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(progress, "LOG_SECONDS", 0)
        second = Stopped(patch)
        assert zeroshot(model[0], data, *command) == 0
    said = capsys.readouterr().err
    assert f"{partial}: 6 batches are scored already" in said and "record: 12 of 12 records, " in said
    assert output.read_bytes() == (once / "answers.jsonl").read_bytes() and json.loads(new_report.read_text()) == report
    with monkeypatch.context() as patch:
        every = Stopped(patch)
        assert zeroshot(model[0], data, *command) == 0
    assert second.num_scored == every.num_scored - 6 and not partial.exists()


def test_a_run_that_was_stopped_is_not_resumed_as_another(model, data, tmp_path, capsys, monkeypatch):
    path = write_checkpoint(tmp_path / "model", SYMBOLS, max_tokens=CONTEXT)[0]
    tasks = write_tasks(tmp_path / "tasks")
    output = tmp_path / "answers.jsonl"
    command = ["--tasks", "copa", "--batch-tokens", "20", "--output", output]
    with monkeypatch.context() as patch:
        Stopped(patch, after=1)
        assert zeroshot(path, tasks, *command) == 130
    partial = tmp_path / "answers.jsonl.partial"
    kept = partial.read_bytes()
    output.write_text("{}\n")

    def refused(*more, words):
        capsys.readouterr()
        assert zeroshot(path, tasks, *command, *more) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and str(partial) in error and all(word in error for word in words), error
        assert partial.read_bytes() == kept and output.read_text() == "{}\n"

    refused("--limit", 3, words=["limit None there and 3 here", "other records of copa", "repeat its command"])
    refused("--batch-tokens", 50, words=["batch_tokens 20 there and 50 here"])
    refused("--tasks", "copa,piqa", words=["with records of piqa only here: "])
    refused("--tasks", "piqa", words=["records of copa only there", "records of piqa only here"])
    state = torch.load(path)
    state["model"]["decoder.core.norm.weight"][0] += 1
    torch.save(state, path)
    refused(words=["with other weights:"])
    state["model"]["decoder.core.norm.weight"][0] -= 1
    torch.save(state, path)
    val = tasks / "copa" / "val.jsonl"
    content = val.read_text()
    val.write_text(content.replace('"w1', '"w2'))
    refused(words=["with other records of copa:"])
    val.write_text(content)
    lines = kept
    for kept in (b"mine", b"mine\n", lines + b"[1]\n", lines.replace(b"[[[-", b"[[[-1")):
        partial.write_bytes(kept)
        refused(words=["is damaged, or not a file of scores"])


def test_all_ranks_refuse_and_name_how_many_hold_the_experts(tmp_path, monkeypatch):
    said, model = [], SimpleNamespace(decoder=make("gmlp"))
    monkeypatch.setattr(Team, "gather", lambda self, part: said.append(part) or [part] * self.size)
    args = argparse.Namespace(output=str(tmp_path / "x.jsonl"), spread_experts=True)
    assert _kept_scores(args, {}, model, [], Team(0, 2)).num_batches == 0
    words = "weights over 2 ranks only there, weights over 4 ranks only here: "
    with pytest.raises(UserError, match=words):
        _kept_scores(args, {}, model, [], Team(0, 4))
    monkeypatch.setattr(Team, "gather", lambda self, part: [said[-1], part])
    with pytest.raises(UserError, match=words):
        PartialScores(tmp_path / "x.jsonl.partial", {}, Team(1, 2))


def test_records_on_standard_output_are_nothing_else(model, data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for stream in ("-", "/dev/stdout"):
        assert zeroshot(model[0], data, "--tasks", "copa", "--output", stream) == 0
        captured = capsys.readouterr()
        assert len([json.loads(line) for line in captured.out.splitlines()]) == 6 and "95 % interval" in captured.err
    with monkeypatch.context() as patch:
        Stopped(patch, after=0)
        assert zeroshot(model[0], data, "--tasks", "copa", "--output", "-") == 130
    assert not list(tmp_path.iterdir())


def test_scores_are_not_kept_through_a_link(tmp_path):
    (tmp_path / "y.partial").symlink_to(tmp_path / "of somebody else")
    with pytest.raises(UserError, match=r"y\.partial is a link, through which no scores are kept: remove it"):
        PartialScores(tmp_path / "y.partial", {}, Team())
    assert not (tmp_path / "of somebody else").exists()


def test_a_full_disk_leaves_whole_lines_of_scores(tmp_path):
    """As a full disk does, the limit lets a part of a line in; what is kept is read again."""
    path, limits = tmp_path / "partial", resource.getrlimit(resource.RLIMIT_FSIZE)
    scores = {0: [[np.array([-1.0, -2.0])]]}
    part, _ = PartialScores(path, {}, Team()).of("copa")
    part.add(scores)
    size, handler = path.stat().st_size, signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot keep scores in .*partial: "):
            part.add({1: scores[0]})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.stat().st_size == size
    part.add({2: scores[0]})
    assert PartialScores(path, {}, Team()).num_records("copa") == 2


def test_records_of_a_run_that_was_stopped_are_no_part_of_the_rate(monkeypatch, capsys):
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr(progress, "LOG_SECONDS", 0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(now)))
    records = progress.RecordsProgress(200, shown=True)
    records.of("copa", known=100)(50)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "copa: 100 of 200 records, 0.0 a second"
    assert re.fullmatch(r"copa: 150 of 200 records, [0-3]\.\d a second", second)


def test_progress_in_a_log_is_a_line_now_and_then(model, data, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LOG_SECONDS", 0)
    assert zeroshot(model[0], data, "--tasks", "copa,piqa") == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("piqa: 12 of 12 records, ") and "\r" not in "".join(lines)
    monkeypatch.setattr(progress, "LOG_SECONDS", 60)
    assert zeroshot(model[0], data, "--tasks", "copa") == 0
    assert capsys.readouterr().err == ""


def test_what_is_wrong_with_every_task_is_said_before_the_first_is_scored(data, tmp_path, capsys, monkeypatch):
    path, _ = write_checkpoint(tmp_path / "shorter", SYMBOLS, max_tokens=6)
    Stopped(monkeypatch, after=0)
    (tmp_path / "tasks").mkdir()
    for task in ("copa", "piqa", "winogrande", "hellaswag", "record"):
        (tmp_path / "tasks" / task).symlink_to(data / task)
    assert zeroshot(path, tmp_path / "tasks", "--tasks", "all") == 1
    first, *listed = capsys.readouterr().err.splitlines()
    assert first == "smlp: error: 5 of 6 tasks cannot be scored:"
    too_long = [line.strip().partition(": ")[0] for line in listed if "of 6 examples do not fit" in line]
    assert too_long == ["piqa", "winogrande", "hellaswag", "record"]
    assert len(listed) == 5 and "cloze_test_ALL_test.csv" in listed[1] and "is missing" in listed[1]


def test_lines_that_are_there_twice_count_once(model, data, tmp_path, capsys):
    tasks = tmp_path / "tasks"
    shutil.copytree(data, tasks)
    val = tasks / "copa" / "val.jsonl"
    rows = [json.loads(line) for line in val.read_text().splitlines()]
    once = results(tmp_path, model[0], tasks, "--tasks", "copa")[0]["tasks"]["copa"]
    with val.open("a") as file:
        for row in [*rows, {**rows[0], "idx": 77}, {**rows[0], "premise": "w9 w8 .", "idx": 3}]:
            file.write(json.dumps(row) + "\n")
    twice = results(tmp_path, model[0], tasks, "--tasks", "copa", "--limit", 6)[0]["tasks"]["copa"]
    assert twice["num_repeated"] == 6 and twice["num_records"] == 8 and twice["n"] == 6
    assert twice["standard_error"] == once["standard_error"] and twice["num_alike"] == twice["num_shared_ids"] == 0
    printed = capsys.readouterr().out
    assert "6 records appear in the file again" in printed
    assert "copa: the first 6 of 8 records, in the order of the file, which is not a random sample; " in printed
    whole = results(tmp_path, model[0], tasks, "--tasks", "copa")[0]["tasks"]["copa"]
    assert (whole["n"], whole["num_alike"], whole["num_shared_ids"]) == (8, 1, 1)


def test_gpt3_compares_means_of_completions(model, data, tmp_path):
    path, decoder = model
    more = ["--templates", "gpt3", "--limit", 2]
    report, rows = results(tmp_path, path, data, "--tasks", "piqa,winogrande,record", *more)
    assert {one["rule"] for one in report["tasks"].values()} == {"tokens"}
    for row in rows:
        for candidate in row["candidates"]:
            values = log_probs(decoder, ids_of(row["prompt"] + candidate["text"]))[candidate["num_context_tokens"] :]
            assert candidate["scores"]["tokens"] == pytest.approx(sum(values) / len(values), abs=1e-5)


def test_short_contexts_are_cut_on_the_left_and_counted(data, tmp_path):
    path, decoder = write_checkpoint(tmp_path / "short", SYMBOLS, max_tokens=12)
    report, rows = results(tmp_path, path, data, "--tasks", "hellaswag")
    cut = [row for row in rows if row["num_cut_tokens"]]
    assert report["tasks"]["hellaswag"]["num_truncated"] == len(cut) > 0
    for row in cut:
        for candidate in row["candidates"]:
            kept = ids_of(row["prompt"] + candidate["text"])[row["num_cut_tokens"] :]
            assert candidate["num_tokens"] == len(kept) <= 12
            assert candidate["log_probs"] == pytest.approx(
                log_probs(decoder, kept)[-len(candidate["log_probs"]) :], abs=1e-5
            )


def test_candidates_that_no_context_holds_stop_it_or_are_left_out(data, tmp_path, capsys):
    path, _ = write_checkpoint(tmp_path / "shorter", SYMBOLS, max_tokens=6)
    assert zeroshot(path, data, "--tasks", "piqa") == 1
    error = capsys.readouterr().err
    assert "piqa: " in error and "of 6 examples do not fit" in error and "--skip-too-long" in error
    report, rows = results(tmp_path, path, data, "--tasks", "piqa", "--skip-too-long")
    assert report["tasks"]["piqa"]["n"] == len(rows) == 6 - report["tasks"]["piqa"]["num_skipped"] < 6


def test_partial_routing_scores_after_its_prefix_or_fills_it(partial, data, tmp_path, capsys):
    path, decoder = partial
    assert zeroshot(path, data, "--tasks", "copa") == 1
    assert "ends within the first 16 positions" in (error := capsys.readouterr().err) and "--fill-prefix" in error
    report, rows = results(tmp_path, path, data, "--tasks", "copa", "--fill-prefix")
    assert report["tasks"]["copa"]["num_partly_scored"] == 0
    for row in rows:
        context_tokens = row["candidates"][0]["num_context_tokens"]
        assert row["num_filled"] == 16 - context_tokens > 0
        for candidate in row["candidates"]:
            ids = ids_of(row["prompt"] + candidate["text"])
            value = log_probs(decoder, ids, 1 + row["num_filled"])
            assert candidate["log_probs"] == pytest.approx(value[-len(candidate["log_probs"]) :], abs=1e-5)
    # stories are long enough for all that is scored to come after the prefix, or for some of it
    report, rows = results(tmp_path, path, data, "--tasks", "storycloze")
    begins = [row["candidates"][0]["num_context_tokens"] for row in rows]
    assert report["tasks"]["storycloze"]["num_partly_scored"] == sum(begin < 16 for begin in begins)
    assert all(len(c["log_probs"]) <= c["num_tokens"] - 16 for row in rows for c in row["candidates"])


def test_few_shot_priming(model, data, tmp_path):
    path, _ = model
    command = ["--tasks", "winogrande", "--num-fewshot", 2, "--skip-too-long"]
    report, rows = results(tmp_path, path, data, *command, "--fewshot-seed", 3)
    assert report["tasks"]["winogrande"]["fewshot_split"] == "train_s"
    zero = results(tmp_path, path, data, "--tasks", "winogrande")[1]
    train = [json.loads(line) for line in (data / "winogrande" / "train_s.jsonl").read_text().splitlines()]
    solved = {record["sentence"].replace("_", record["option1"]) for record in train}
    used = set()
    for row in rows:
        bare = next(one for one in zero if one["id"] == row["id"])["prompt"]
        assert row["prompt"].endswith(f" {bare}")
        before = row["prompt"].removesuffix(f" {bare}")
        found = [text for text in solved if text in before]
        assert len(found) == 2 and len(before) == sum(map(len, found)) + 1
        used |= set(found)
    assert len(used) == 2  # the same ones for every record
    again = results(tmp_path, path, data, *command, "--fewshot-seed", 3)[1]
    other = results(tmp_path, path, data, *command, "--fewshot-seed", 4)[1]
    assert again == rows and [row["prompt"] for row in other] != [row["prompt"] for row in rows]


@pytest.mark.parametrize(("task", "part", "limit"), [("copa", "text", 3), ("winogrande", "bare", 2)])
def test_unconditional_scores_take_off_what_a_candidate_is_worth_alone(model, data, tmp_path, task, part, limit):
    """Without what follows it in its sentence."""
    path, decoder = model
    _, rows = results(tmp_path, path, data, "--tasks", task, "--scoring", "unconditional", "--limit", limit)
    assert len(rows) == limit
    for row in rows:
        for candidate in row["candidates"]:
            alone = log_probs(decoder, ids_of(f"Answer: {candidate[part]}"))[1:]
            want = candidate["scores"]["continuation"] - sum(alone)
            assert candidate["scores"]["unconditional"] == pytest.approx(want, abs=1e-4)


def test_one_record_has_no_standard_error(model, data, tmp_path):
    report, _ = results(tmp_path, model[0], data, "--tasks", "copa", "--limit", 1)
    assert report["tasks"]["copa"]["standard_error"] is None
    assert report["settings"]["limit"] == 1 and report["settings"]["data_dir"] == str(data)


def test_few_shot_examples_do_not_depend_on_the_limit(model, data, tmp_path, capsys):
    """Train holds the last record of val, too, which is an example with no limit."""
    shutil.copytree(data, tmp_path / "data")
    train, val = (tmp_path / "data" / "copa" / f"{split}.jsonl" for split in ("train", "val"))
    lines = val.read_text().splitlines(), train.read_text().splitlines()
    train.write_text("\n".join([lines[0][-1], *lines[1][:1]]) + "\n")
    command = ["--tasks", "copa", "--num-fewshot", 1]
    for seed in range(4):
        options = [[*command, "--fewshot-seed", seed, *limit] for limit in ([], ["--limit", 1])]
        found = [results(tmp_path, model[0], tmp_path / "data", *some)[1][0]["prompt"] for some in options]
        assert found[0] == found[1]
    assert zeroshot(model[0], data, *command, "--split", "train", "--limit", 1) == 1
    assert "has 0 that are not among those scored (all" in capsys.readouterr().err


def test_line_breaks_as_spaces(model, data, tmp_path):
    path, _ = model
    lengths = {}
    for newline in NEWLINES:
        report, rows = results(tmp_path, path, data, "--tasks", "record", "--newline", newline)
        assert report["settings"]["newline"] == newline
        lengths[newline] = [row["candidates"][0]["num_tokens"] for row in rows]
    assert [one - 2 for one in lengths["eos"]] == lengths["space"]  # two line breaks in each passage


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "copa,boolq"], ["boolq", "copa, piqa"]),
        (["--tasks", "copa,piqa", "--split", "train"], ["--split train is for a single task, but 2"]),
        (["--tasks", "copa", "--fewshot-seed", "5"], ["--fewshot-seed 5 would not be used", "of --num-fewshot"]),
        (["--tasks", "copa", "--split", "dev"], ["copa has no split 'dev'", "val, train"]),
        (["--tasks", "copa", "--limit", "0"], ["--limit must be at least 1, got 0"]),
        (["--tasks", "copa", "--batch-tokens", "0"], ["--batch-tokens must be at least 1"]),
        (["--tasks", "copa", "--num-fewshot", "7"], ["--num-fewshot 7", "has 6"]),
        (["--tasks", "copa", "--output", "/no/such/folder/x"], ["--output /no/such/folder/x"]),
        (["--tasks", "copa", "--output", "x.json", "--json", "./x.json"], ["--output and --json both name ./x.json"]),
        (["--tasks", "copa", "--nproc", "0"], ["--nproc must be at least 1, got 0"]),
        (["--tasks", "copa", "--device", "cuda:99"], ["--device cuda:99 cannot be used here"]),
        (["--tasks", "copa", "--spread-experts"], ["--spread-experts: 1 rank and the 2 experts", "another --nproc"]),
    ],
)
def test_bad_input_is_one_sentence(model, data, arguments, words, capsys):
    assert zeroshot(model[0], data, *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("smlp: error: ") and error.count("\n") == 1 and all(word in error for word in words), error


def test_missing_files_and_broken_weights_are_named(data, tmp_path, capsys):
    path, _ = write_checkpoint(tmp_path / "model", SYMBOLS)
    assert zeroshot(path, tmp_path, "--tasks", "hellaswag") == 1
    assert "hellaswag_val.jsonl is missing; it comes from github.com/rowanz/hellaswag" in capsys.readouterr().err
    state = torch.load(path)
    state["model"]["decoder.core.norm.weight"].fill_(math.nan)
    torch.save(state, path)
    assert zeroshot(path, data, "--tasks", "copa") == 1
    assert f"decoder.core.norm.weight of {path} is not finite" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["zeroshot", "lm-eval"])
@pytest.mark.parametrize("option", ["--output", "--json"])
def test_no_file_of_a_task_is_written_over(data, model, capsys, command: str, option: str) -> None:
    path = data / "copa" / "val.jsonl"
    before = path.read_bytes()
    words = ["--path", str(model[0]), "--data-dir", str(data), "--tasks", "piqa", "--skip-too-long", option, str(path)]
    assert main([command, *words]) == 1
    assert re.search(
        rf"{option} {re.escape(str(path))}:? is a file of a task in --data-dir: name another one",
        capsys.readouterr().err,
    )
    assert path.read_bytes() == before


def test_files_of_tasks_that_are_not_asked_for_may_be_archives(data, model, tmp_path, capsys) -> None:
    folder = shutil.copytree(data, tmp_path / "tasks")
    labels = folder / "piqa" / "valid-labels.lst"
    labels.rename(f"{labels}.zip")
    assert zeroshot(model[0], folder, "--tasks", "copa", "--limit", 1, "--output", tmp_path / "copa.jsonl") == 0
    assert zeroshot(model[0], folder, "--tasks", "piqa") == 1
    assert "valid-labels.lst.zip exists: decompress it" in capsys.readouterr().err


def test_the_command_knows_what_the_library_has():
    """And no more: the tasks are the columns of the paper's table, in its order."""
    assert tuple(READERS) == _TASKS == tuple(TABLE_6) and tuple(TEMPLATES) == _TEMPLATES
    assert ("auto", *RULES) == _SCORING


def test_the_report_is_not_written_where_scores_are_kept(data, model, tmp_path, capsys) -> None:
    output = tmp_path / "answers.jsonl"
    words = ["--tasks", "copa", "--output", str(output), "--json", f"{output}.partial"]
    assert main(["zeroshot", "--path", str(model[0]), "--data-dir", str(data), *words]) == 1
    assert f"--json {output}.partial is where the scores of --output are kept" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
