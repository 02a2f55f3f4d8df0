"""Checkpoints in lm-evaluation-harness: its numbers on the six tasks are those of ``smlp zeroshot``."""

import importlib
import json
import os
import sys
import types

os.environ["HF_HUB_OFFLINE"] = "1"  # before the harness is imported

import pytest
import torch
from lm_eval.api.instance import Instance
from running import run_python
from tiny_checkpoints import write_checkpoint
from zeroshot_data import WORDS, write_tasks

import smlp
from smlp.cli.main import main
from smlp.errors import UserError
from smlp.evaluation.lm_eval.evaluate import evaluate
from smlp.evaluation.lm_eval.model import HarnessModel
from smlp.evaluation.zeroshot.readers import READERS
from smlp.evaluation.zeroshot.templates import example

TASKS = ["copa", "piqa", "storycloze", "winogrande", "hellaswag", "record"]
SYMBOLS = [*WORDS, ".", "because", "therefore", ",", "w1:"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), SYMBOLS, "switch_lm_tiny", 60, num_experts=4)[0]


@pytest.fixture(scope="module")
def harness(path):
    return HarnessModel(str(path), batch_tokens=200)


def test_the_six_tasks_agree_with_the_harness(path, harness, data, tmp_path):
    theirs = evaluate(harness, TASKS, data_dir=data)
    output, report = tmp_path / "o.jsonl", tmp_path / "r.json"
    words = ["--tasks", "all", "--data-dir", data, "--templates", "lm-eval", "--output", output, "--json", report]
    assert main(["zeroshot", "--path", str(path), "--device", "cpu", *map(str, words)]) == 0
    ours = json.loads(report.read_text())["tasks"]
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    for task in TASKS:
        found = theirs["results"][task]
        if task == "record":
            assert (found["em,none"], found["f1,none"]) == (ours[task]["exact_match"], ours[task]["f1"])
        else:
            assert found["acc,none"] == ours[task]["accuracy"]
        if task in ("piqa", "hellaswag"):
            assert found["acc_norm,none"] == ours[task]["accuracy_by_rule"]["chars"]
        samples = sorted(theirs["samples"][task], key=lambda sample: sample["doc_id"])
        own_rows = [row for row in rows if row["task"] == task]
        assert len(samples) == len(own_rows) == 6
        for sample, row in zip(samples, own_rows, strict=True):
            scores = [candidate["scores"]["continuation"] for candidate in row["candidates"]]
            assert [response[0] for response in sample["filtered_resps"]] == pytest.approx(scores, abs=1e-4)


def test_records_on_standard_output_are_nothing_else(path, data, capsys):
    assert lm_eval(path, "--tasks", "copa", "--data-dir", data, "--output", "-") == 0
    captured = capsys.readouterr()
    assert len([json.loads(line) for line in captured.out.splitlines()]) == 6 and "|copa" in captured.err


def test_half_precision(path, data, tmp_path):
    found = {}
    for dtype in ("fp32", "bf16"):
        output = tmp_path / f"{dtype}.jsonl"
        assert lm_eval(path, "--tasks", "copa", "--data-dir", data, "--dtype", dtype, "--output", output) == 0
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        found[dtype] = [response[0] for row in rows for response in row["filtered_resps"]]
    assert found["bf16"] != found["fp32"] and found["bf16"] == pytest.approx(found["fp32"], rel=0.02)


def test_record_is_written_as_the_harness_writes_it(data, monkeypatch):
    """Its own module wants transformers, for two functions that no text depends on."""
    stub = types.ModuleType("transformers.data.metrics.squad_metrics")
    for name in ("transformers", "transformers.data", "transformers.data.metrics"):
        package = types.ModuleType(name)
        package.__path__ = []
        package.squad_metrics = stub
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.super_glue.record.util", raising=False)
    theirs = importlib.import_module("lm_eval.tasks.super_glue.record.util")
    for item in READERS["record"].read(data):
        doc = {"passage": item.passage, "query": item.query, "entities": sorted(item.entities)}
        want = [f"{theirs.doc_to_text(doc)} {choice}" for choice in theirs.doc_to_choice(doc)]
        assert [choice.context + choice.continuation for choice in example(item, "lm-eval").choices] == want


@torch.no_grad()
def forward_sum(decoder, given, scored):
    """Log-probability of the last ids after the ids before them."""
    table = decoder(torch.tensor([[*given, *scored][:-1]])).logits[0].log_softmax(1)
    return sum(float(table[len(given) - 1 + place, token]) for place, token in enumerate(scored))


def request(kind, *arguments, number=0, repeats=1):
    return Instance(kind, {}, arguments, number, metadata=("mine", number, repeats))


def test_scores_of_single_requests(harness):
    decoder = harness.lm.decoder
    first, second = harness.tok_encode("w1 w2"), harness.tok_encode("w3 w4")
    results = harness.loglikelihood(
        [
            request("loglikelihood", "w1 w2", " w3 w4"),
            request("loglikelihood", "", "w3 w4", number=1),
            request("loglikelihood", "w1", "", number=2),
        ],
        disable_tqdm=True,
    )
    assert [value for value, _ in results] == pytest.approx(
        [forward_sum(decoder, [2, *first], second), forward_sum(decoder, [2], second), 0.0], abs=1e-5
    )
    assert results[2][1] is True
    likeliest = harness.lm.vocabulary.symbols[int(decoder(torch.tensor([[2, *first]])).logits[0, -1].argmax())]
    words = [likeliest, next(word for word in WORDS if word != likeliest)]
    asked = [request("loglikelihood", "w1 w2", f" {word}", number=number) for number, word in enumerate(words)]
    assert [is_greedy for _, is_greedy in harness.loglikelihood(asked, disable_tqdm=True)] == [True, False]


def test_a_text_that_is_too_long_loses_what_the_harness_cuts(harness):
    """Each for itself, and the start symbol before any token: the last 61 tokens are left, of which 60 are read."""
    decoder, before = harness.lm.decoder, harness.num_truncated
    ids = torch.randint(4, 34, (61,), generator=torch.Generator().manual_seed(2)).tolist()
    context = " ".join(harness.lm.vocabulary.symbols[token] for token in ids)
    scored = [harness.tok_encode(words) for words in ("w1", "w2 w3", "w1 w2 w3")]
    for length in (57, 58, 59, 60, 61):
        given = " ".join(context.split()[:length])
        asked = [request("loglikelihood", given, f" {words}") for words in ("w1", "w2 w3", "w1 w2 w3")]
        found = [value for value, _ in harness.loglikelihood(asked, disable_tqdm=True)]
        stream = [2, *ids[:length]]
        want = [forward_sum(decoder, [*stream, *own][-61 : -len(own)], own) for own in scored]
        assert found == pytest.approx(want, abs=1e-4)
    assert harness.num_truncated == before + 4
    with pytest.raises(UserError, match=r"1 of mine .*a candidate has 61 tokens, but the model's context holds 60"):
        harness.loglikelihood([request("loglikelihood", "", context)])


def test_white_space_before_a_continuation_belongs_to_it(harness):
    """As in the harness's TemplateLM: a line break is scored, which is a token here."""
    decoder = harness.lm.decoder
    (found, _), (plain, _) = harness.loglikelihood(
        [request("loglikelihood", "w1 \n", "w2"), request("loglikelihood", "w1  ", "w2", number=1)], disable_tqdm=True
    )
    first, second = harness.tok_encode("w1"), harness.tok_encode("w2")
    assert found == pytest.approx(forward_sum(decoder, [2, *first], [2, *second]), abs=1e-5)
    assert plain == pytest.approx(forward_sum(decoder, [2, *first], second), abs=1e-5)


def test_a_continuation_without_a_token_is_certain_and_counted(harness):
    before = harness.num_without_token
    asked = [request("loglikelihood", "w1", " "), request("loglikelihood", "w1", " w2", number=1)]
    first, second = harness.loglikelihood(asked, disable_tqdm=True)
    assert first == (0.0, True) and second == harness.loglikelihood(asked[1:], disable_tqdm=True)[0]
    assert harness.num_without_token == before + 1
    # an empty one too, unless white space of the context belongs to it
    asked = [request("loglikelihood", "w1", ""), request("loglikelihood", "w1\n", "", number=1)]
    first, (second, _) = harness.loglikelihood(asked, disable_tqdm=True)
    assert first == (0.0, True) and harness.num_without_token == before + 2
    assert second == pytest.approx(forward_sum(harness.lm.decoder, [2, *harness.tok_encode("w1")], [2]), abs=1e-5)


@pytest.mark.parametrize("name", ["device", "dictionary", "tokenizer"])
def test_what_a_loaded_model_has_already_is_refused(harness, name):
    with pytest.raises(UserError, match=f"{name}='nonsense' has no effect on a model that is loaded: leave it out"):
        HarnessModel(harness.lm, **{name: "nonsense"})


@pytest.mark.parametrize("length", [7, 60, 61, 150])
def test_long_texts_are_scored_in_windows(harness, length):
    ids = torch.randint(4, 34, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    text = " ".join(harness.lm.vocabulary.symbols[token] for token in ids)
    want, stream = 0.0, [2, *ids]
    for begin in range(0, length, 60):
        end = min(begin + 60, length)
        given = stream[max(end - 60, 0) : begin + 1]  # the last window goes back as far as the context holds
        want += forward_sum(harness.lm.decoder, given, stream[begin + 1 : end + 1])
    (found,) = harness.loglikelihood_rolling([request("loglikelihood_rolling", text)], disable_tqdm=True)
    assert found == pytest.approx(want, abs=1e-4)


def test_windows_of_partial_routing_follow_a_prefix(tmp_path):
    """Every token once, after P others or start symbols, in a context of 40 with P = 16."""
    path, decoder = write_checkpoint(tmp_path, SYMBOLS, "smlp_partial_tiny", 40, prefix_fraction=0.4)
    lm = smlp.load_pretrained(path)
    ids = torch.randint(4, 34, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    asked = [request("loglikelihood_rolling", " ".join(lm.vocabulary.symbols[token] for token in ids))]
    with pytest.raises(UserError, match="first 16 positions of this model only choose experts"):
        HarnessModel(lm).loglikelihood_rolling(asked)
    want, stream = 0.0, [2] * 17 + ids
    for begin in range(0, 70, 24):
        end = min(begin + 24, 70)
        want += forward_sum(decoder, stream[max(end + 17 - 41, 0) : begin + 17], stream[begin + 17 : end + 17])
    (found,) = HarnessModel(lm, fill_prefix=True).loglikelihood_rolling(asked, disable_tqdm=True)
    assert found == pytest.approx(want, abs=1e-4)


def test_what_gives_way_is_counted(tmp_path):
    path, _ = write_checkpoint(tmp_path, SYMBOLS, "smlp_partial_tiny", 40, prefix_fraction=0.4)
    model = HarnessModel(smlp.load_pretrained(path))
    long = " ".join(WORDS * 2)
    model.loglikelihood([request("loglikelihood", long, " w1"), request("loglikelihood", "w1", " w2" * 18, number=1)])
    assert (model.num_truncated, model.num_partly_scored) == (1, 1)
    with pytest.raises(UserError, match="mine, example 0 ends within the first 16 positions"):
        model.loglikelihood([request("loglikelihood", "w1", " w2")])


def after(lm, ids, max_tokens, **settings):
    """The text that is written after some ids, without a start symbol before them."""
    ((_, text),) = lm.writer(max_tokens, **settings).finished([ids])
    return text


def test_texts_are_written_until_a_stop_string(harness):
    long = " ".join(["w1 w2 w3"] * 40)
    greedy, short = {"until": [" w9", " ."], "max_gen_toks": 20}, {"until": "w1", "max_gen_toks": 5, "do_sample": False}
    found = harness.generate_until(
        [
            request("generate_until", "w1 w2", greedy),
            request("generate_until", long, greedy, number=1),
            request("generate_until", "w5", short, number=2),
        ],
        disable_tqdm=True,
    )
    lm = harness.lm
    assert found[0] == lm.generate("w1 w2", max_tokens=20, greedy=True, stop=[" w9", " ."])
    assert found[1] == after(lm, lm.tokenize(long)[-40:], 20, greedy=True, stop=[" w9", " ."])  # 60 positions, less 20
    assert found[2] == lm.generate("w5", max_tokens=5, greedy=True, stop="w1")


SAMPLED = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 3.0}


def test_repeats_differ_and_follow_the_seed(harness):
    """The k-th answer to a request is the k-th text that is drawn for its prompt; greedy ones are all the same."""
    lm = harness.lm
    first = request("generate_until", "w1 w2", SAMPLED, repeats=4)
    second = request("generate_until", "w5", SAMPLED, number=1, repeats=4)
    found = harness.generate_until([*[first] * 4, *[second] * 4], disable_tqdm=True)
    drawn = {"max_tokens": 8, "temperature": 3.0, "num_return": 4}
    assert found == [*lm.generate("w1 w2", **drawn), *lm.generate("w5", **drawn)] and len(set(found[:4])) == 4
    assert harness.generate_until([*[first] * 4, *[second] * 4], disable_tqdm=True) == found
    assert harness.generate_until([first], disable_tqdm=True) == found[:1]
    seeded = request("generate_until", "w1 w2", {**SAMPLED, "seed": 7}, repeats=4)
    assert harness.generate_until([seeded] * 4, disable_tqdm=True) == lm.generate("w1 w2", **drawn, seed=7) != found[:4]
    greedy = request("generate_until", "w1", {"until": [], "max_gen_toks": 5}, repeats=3)
    assert harness.generate_until([greedy] * 3, disable_tqdm=True) == [lm.generate("w1", 5, greedy=True)] * 3


def test_copies_that_pad_a_rank_are_no_answers(harness):
    """With several ranks, the harness repeats the last request until all have equally many, and notes every answer."""
    asked = request("generate_until", "w1 w2", SAMPLED, repeats=3)
    padded = [asked] * 3 * 4
    found = harness.generate_until(padded, disable_tqdm=True)
    assert found[:3] == harness.lm.generate("w1 w2", max_tokens=8, temperature=3.0, num_return=3)
    for text, to in zip(found, padded, strict=True):
        to.resps.append(text)
    harness.barrier()
    assert asked.resps == found[:3]


def test_settings_of_generation_are_what_tasks_ask_for(harness):
    lm = harness.lm

    def written(prompt, **settings):
        (text,) = harness.generate_until([request("generate_until", prompt, settings)], disable_tqdm=True)
        return text

    assert written("w1", max_gen_toks=9, temperature=2.0, top_k=5, top_p=0.9) == lm.generate(
        "w1", 9, temperature=2.0, top_k=5, top_p=0.9
    )
    assert written("w1", max_gen_toks=9, do_sample=False, temperature=2.0) == lm.generate("w1", 9, greedy=True)
    penalised = lm.generate("w1", 9, greedy=True, repetition_penalty=5.0)
    assert written("w1", max_gen_toks=9, repetition_penalty=5.0) == penalised != lm.generate("w1", 9, greedy=True)
    searched = lm.generate("w1 w2", 9, beam=3, length_penalty=0.5)
    assert written("w1 w2", max_gen_toks=9, num_beams=3, length_penalty=0.5) == searched
    stop = searched.split()[-1]
    until = written("w1 w2", max_gen_toks=9, num_beams=3, length_penalty=0.5, until=[stop])
    assert until == searched[: searched.index(stop)]
    long = " ".join(WORDS * 3)
    before = harness.num_truncated
    assert written(long, max_gen_toks=20, num_beams=2) == after(lm, lm.tokenize(long)[-40:], 20, beam=2)
    assert harness.num_truncated == before + 1
    with pytest.warns(UserWarning, match="256 new tokens, but at most 59 fit, and prompts are cut to 1 token"):
        written("w1")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"num_return_sequences": 2, "typical_p": 1},
            "has 'num_return_sequences', 'typical_p', which is not supported",
        ),
        ({"num_beams": 2, "do_sample": True}, "beam=2 does not sample tokens.* do_sample"),
        ({"num_beams": 2, "temperature": 1.0}, "beam=2 does not sample tokens"),
        ({"num_beams": 2, "repetition_penalty": 1.2}, "beam=2 does not sample tokens.* repetition_penalty"),
        ({"length_penalty": 1.2}, "length_penalty needs a beam search"),
        ({"max_gen_toks": 0}, "max_tokens must be from 1"),
        ({"max_gen_toks": "many"}, "max_gen_toks 'many', which is not a valid number"),
        ({"do_sample": "yes"}, "do_sample 'yes', which is neither"),
        ({"temperature": -1.0, "do_sample": True}, "temperature must be 0 or from"),
        ({"seed": 1.5}, "seed 1.5, which is not a valid number"),
        ({"until": [3]}, r"until \[3\], which is neither text nor a list of texts"),
    ],
)
def test_settings_that_cannot_be_followed_are_named(harness, settings, words, monkeypatch):
    monkeypatch.setattr(HarnessModel, "_written", None)  # nothing is written before
    asked = [request("generate_until", "w1", {"max_gen_toks": 5}), request("generate_until", "w1", settings, number=1)]
    with pytest.raises(UserError, match=f"^mine.*generation_kwargs.*{words}"):
        harness.generate_until(asked, disable_tqdm=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "names no checkpoint: give path=CHECKPOINT"),
        ("path=x,banana=1", "has 'banana', which is not one of path, batch_tokens"),
        ("path=x,batch_tokens=0", "batch_tokens must be a number of at least 1, got 0"),
        ("path=x,batch_tokens=abc", "batch_tokens must be a number of at least 1, got 'abc'"),
        ("path=x,newline=x", "newline must be one of eos, space, got 'x'"),
        ("path=x,fill_prefix=maybe", "fill_prefix must be True or False, got 'maybe'"),
    ],
)
def test_arguments_of_the_harness_command_line_are_checked(words, message):
    with pytest.raises(UserError, match=message):
        HarnessModel.create_from_arg_string(words, {"batch_size": None, "max_batch_size": None})


def test_records_that_no_context_holds_stop_it_or_are_left_out(tmp_path, capsys):
    """As in smlp zeroshot; of all tasks at once."""
    data = write_tasks(tmp_path / "tasks")
    short = write_checkpoint(tmp_path / "short", SYMBOLS, max_tokens=6)[0]
    words = ["--tasks", "copa,piqa,hellaswag", "--data-dir", data]
    older = tmp_path / "older.jsonl"
    older.write_text("{}\n")
    assert lm_eval(short, *words, "--output", older) == 1
    assert older.read_text() == "{}\n"  # nothing was scored
    error = capsys.readouterr().err.splitlines()[-1]
    assert "5 records do not fit: 2 of hellaswag, 3 of piqa (first: hellaswag, example 1: a candidate has 7" in error
    report, ours = tmp_path / "r.json", tmp_path / "ours.json"
    with (data / "copa" / "val.jsonl").open("a") as file:
        file.write((data / "copa" / "val.jsonl").read_text())
    assert lm_eval(short, *words, "--skip-too-long", "--limit", 5, "--json", report) == 0
    printed = capsys.readouterr().out
    assert "piqa: 3 records are left out" in printed and "copa: 6 records appear in the file again" in printed
    more = ["--templates", "lm-eval", "--skip-too-long", "--limit", 5, "--json", ours, "--device", "cpu"]
    assert main([*map(str, ["zeroshot", "--path", short, *words, *more])]) == 0
    theirs, ours = json.loads(report.read_text()), json.loads(ours.read_text())["tasks"]
    for task in ("copa", "piqa", "hellaswag"):
        assert theirs["settings"]["num_skipped"].get(task, 0) == ours[task]["num_skipped"]


def test_partial_routing_has_to_be_filled(tmp_path):
    path, decoder = write_checkpoint(tmp_path, SYMBOLS, "smlp_partial_tiny", 40, prefix_fraction=0.4)
    lm = smlp.load_pretrained(path)
    asked = [request("loglikelihood", "w1", " w2 w3")]
    with pytest.raises(UserError, match="mine, example 0 ends within the first 16 positions"):
        HarnessModel(lm).loglikelihood(asked)
    ((value, _),) = HarnessModel(lm, fill_prefix=True).loglikelihood(asked, disable_tqdm=True)
    assert value == pytest.approx(forward_sum(decoder, [2] * 16 + lm.tokenize("w1"), lm.tokenize("w2 w3")), abs=1e-5)


def lm_eval(path, *arguments):
    return main(["lm-eval", "--path", str(path), "--device", "cpu", *map(str, arguments)])


def test_the_command_prints_the_harness_table_and_writes_its_results(path, data, tmp_path, capsys):
    report, output = tmp_path / "r.json", tmp_path / "o.jsonl"
    words = ["--data-dir", data, "--limit", 3, "--num-fewshot", 1, "--json", report, "--output", output]
    assert lm_eval(path, "--tasks", "copa,record", *words) == 0
    printed = capsys.readouterr().out
    assert "|copa  |" in printed and "6 records in" in printed
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(row["task"] for row in rows) == ["copa"] * 3 + ["record"] * 3
    assert all(len(row["arguments"][0][0].split("\n\n")) >= 2 for row in rows)  # a solved example before each
    results = json.loads(report.read_text())["results"]
    assert results["copa"]["acc,none"] == sum(row["acc"] for row in rows if row["task"] == "copa") / 3


def test_no_older_file_passes_for_the_result_of_a_run_that_was_stopped(path, data, tmp_path, monkeypatch):
    older = [tmp_path / "r.json", tmp_path / "o.jsonl"]
    for file in older:
        file.write_text("{}\n")

    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("smlp.inference.scoring.candidates.CandidateScorer.score", stop)
    assert lm_eval(path, "--tasks", "copa", "--data-dir", data, "--json", older[0], "--output", older[1]) == 130
    assert not any(file.exists() for file in older)


def test_what_the_harness_cannot_do_is_one_sentence(path, data, capsys):
    assert lm_eval(path, "--tasks", "copa", "--data-dir", data, "--num-fewshot", 70) == 1
    error = capsys.readouterr().err
    assert "lm-evaluation-harness cannot run copa (ValueError: " in error and "--include-path" not in error


@pytest.mark.slow
def test_mistakes_in_a_task_of_ones_own_are_one_sentence(path, data, tmp_path, capsys):
    definition = {
        "task": "mine", "dataset_path": "json", "output_type": "generate_until", "validation_split": "validation",
        "dataset_kwargs": {"data_files": {"validation": str(data / "copa" / "val.jsonl")}, "cache_dir": str(tmp_path)},
        "doc_to_text": "{{premise}}", "doc_to_target": "{{choice1}}", "generation_kwargs": {"max_gen_toks": 2},
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    for change, words in (
        ({"doc_to_text": "{{nothing}}"}, "UndefinedError: 'nothing' is undefined"),
        ({"validation_split": "x"}, "KeyError: 'x'"),
        ({"dataset_path": None}, "cannot run mine (TypeError: "),
        (
            {"generation_kwargs": {"typical_p": 1}},
            "mine: generation_kwargs has 'typical_p', which is not supported here",
        ),
    ):
        (tmp_path / "mine.yaml").write_text(json.dumps({**definition, **change}))
        assert lm_eval(path, "--tasks", "mine", "--include-path", tmp_path) == 1
        assert words in capsys.readouterr().err.splitlines()[-1]
    (tmp_path / "mine.yaml").write_text("task: 5\n")
    assert lm_eval(path, "--tasks", "mine", "--include-path", tmp_path) == 1
    error = capsys.readouterr().err
    assert f"cannot read the tasks in {tmp_path} (" in error.splitlines()[-1] and "Traceback" not in error


def test_a_definition_that_is_no_yaml_is_named(path, tmp_path, monkeypatch, capsys):
    """The harness passes over it."""
    module = importlib.import_module("smlp.evaluation.lm_eval.evaluate")
    read = module._tasks_in
    monkeypatch.setattr(module, "_tasks_in", lambda paths, include_defaults: read(paths, False))  # not its thousands
    (tmp_path / "mine.yaml").write_text("task: mine\n  x: [")
    assert lm_eval(path, "--tasks", "mine", "--include-path", tmp_path) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{tmp_path}/mine.yaml cannot be read: mapping values are not allowed here" in error and "line 2" in error


def test_a_group_may_name_tasks_of_the_harness(path, tmp_path, monkeypatch, capsys):
    """The harness would take their names for tasks that are defined in the group."""
    module = importlib.import_module("smlp.evaluation.lm_eval.evaluate")
    read, asked = module._tasks_in, []
    monkeypatch.setattr(
        module, "_tasks_in", lambda paths, include_defaults: asked.append(include_defaults) or read(paths, False)
    )
    (tmp_path / "mixed.yaml").write_text("group: mixed\ntask: [piqa]\n")
    assert lm_eval(path, "--tasks", "mixed", "--include-path", tmp_path) == 1  # its own are thousands, not read here
    assert asked == [False, True]


def test_files_that_the_harness_cannot_read_are_one_sentence(path, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("no JSON\n")
    definition = {
        "task": "mine", "dataset_path": "json", "output_type": "generate_until", "validation_split": "validation",
        "dataset_kwargs": {"data_files": {"validation": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path)},
        "doc_to_text": "{{premise}}", "doc_to_target": "{{choice1}}",
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(json.dumps(definition))
    assert lm_eval(path, "--tasks", "mine", "--include-path", tmp_path) == 1
    assert "cannot run mine (ArrowInvalid: JSON parse error: " in capsys.readouterr().err.splitlines()[-1]


def test_what_is_wrong_with_every_file_is_said_at_once(path, tmp_path, capsys):
    assert lm_eval(path, "--tasks", "copa,piqa", "--data-dir", tmp_path) == 1
    *_, first, copa, piqa = capsys.readouterr().err.splitlines()
    assert first == "smlp: error: 2 of 2 tasks cannot be scored:"
    assert "copa/val.jsonl is missing" in copa and "piqa/valid.jsonl or" in piqa


def test_predictions_that_are_nan_are_no_accuracy(data, tmp_path, capsys):
    path, _ = write_checkpoint(tmp_path, SYMBOLS, "switch_lm_tiny", 60)
    state = torch.load(path)
    state["model"]["decoder.core.norm.weight"].fill_(3e38)  # finite, but the logits are not
    torch.save(state, path)
    assert lm_eval(path, "--tasks", "copa", "--data-dir", data) == 1
    assert "tokens are NaN or infinite: the checkpoint has diverged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", " , "], ["--tasks names no task"]),
        (["--tasks", "copa", "--data-dir", "/no/such"], ["--data-dir /no/such is not a folder"]),
        (["--tasks", "copa", "--limit", "0"], ["--limit must be at least 1"]),
        (["--tasks", "copa", "--json", "x.json", "--output", "./x.json"], ["--output and --json both name"]),
    ],
)
def test_bad_input_is_one_sentence(path, arguments, words, capsys):
    assert lm_eval(path, *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("smlp: error: ") and error.count("\n") == 1 and all(word in error for word in words), error


def test_an_encoder_is_refused(tmp_path, capsys):
    encoder, _ = write_checkpoint(tmp_path, SYMBOLS, "gmlp_mlm_tiny", 60, num_sparse_layers=0)
    assert lm_eval(encoder, "--tasks", "copa") == 1
    assert (
        "is an encoder, which does not predict next tokens: smlp lm-eval needs a language model"
        in capsys.readouterr().err
    )


def test_without_the_harness_it_says_what_to_install(path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert lm_eval(path, "--tasks", "copa") == 1
    assert "pip install -e '.[lm-eval]'" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_share_records_and_agree(path, data, tmp_path):
    """And a task that nobody has is named, which takes a look at all of the harness's."""
    words = ["lm-eval", "--path", path, "--device", "cpu", "--tasks", "copa,hellaswag", "--data-dir", data]
    assert main([*map(str, words), "--json", str(tmp_path / "one.json")]) == 0
    done = run_python("-m", "smlp", *words, "--json", tmp_path / "two.json", "--nproc", "2", timeout=200)
    assert done.rc == 0, done.stderr
    one, two = (json.loads((tmp_path / name).read_text())["results"] for name in ("one.json", "two.json"))
    assert {task: found["acc,none"] for task, found in one.items()} == {
        task: found["acc,none"] for task, found in two.items()
    }
    done = run_python("-m", "smlp", *words[:-4], "--tasks", "no_such_task", timeout=200)
    assert done.rc == 1 and "lm-evaluation-harness has no task no_such_task" in done.errors[-1]
