"""``smlp eval-lm`` against fairseq's own tool, token by token, and what it adds."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoint_states import WORDS, small, state_of
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder
from running import HELPERS, USER_DIR, Finished, run_python

import smlp
from smlp.cli.eval_data import EvaluationText
from smlp.cli.eval_lm import _samples
from smlp.cli.main import main
from smlp.errors import UserError
from smlp.evaluation.leak import randomise
from smlp.evaluation.parity import Parity, ParityCell
from smlp.text.binarized import BinarizedTokens

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

ARCHS = ("gmlp_lm_tiny", "smlp_tiny", "smlp_partial_tiny", "switch_lm_tiny")
#: options that fairseq has too; how batches are cut makes no difference
MODES = {
    "blocks": ["--batch-size", "3"],
    "window": ["--context-window", "5"],
    "lines": ["--sample-break-mode", "eos"],
}


def text() -> list[str]:
    """Lines of up to seven words: some empty, one with an unknown word, one longer than the context of 12 tokens."""
    draw = np.random.default_rng(0)
    lines = [" ".join(draw.choice(WORDS, draw.integers(1, 8))) for _ in range(40)]
    lines[3] = lines[7] = lines[8] = ""
    lines[10] = "w1 unheard w2"
    lines[20] = " ".join(WORDS[:15])
    return lines


def save(folder: Path, arch: str, **overrides: object) -> None:
    """A checkpoint with random weights, with which every token matters."""
    decoder = randomise(smlp.build(arch, **small(arch, **overrides)))
    torch.save(state_of(decoder, None, arch, 0), folder / f"{arch}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """text.txt, the same as binarised data in data/, and a checkpoint of each architecture."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "text.txt").write_text("\n".join(text()) + "\n")
    (folder / "data").mkdir()
    (folder / "data" / "dict.txt").write_text("".join(f"{word} 1\n" for word in WORDS))
    index = {word: number for number, word in enumerate(WORDS, start=4)}
    builder = MMapIndexedDatasetBuilder(str(folder / "data" / "test.bin"), dtype=np.int32)
    for line in text():
        builder.add_item(torch.tensor([*(index.get(word, 3) for word in line.split()), 2]))
    builder.finalize(str(folder / "data" / "test.idx"))
    for arch in ARCHS:
        save(folder, arch)
    return folder


@pytest.fixture
def evaluate(folder, tmp_path, capsys):
    """``evaluate(arch, *options)`` runs the command on data/; returns what ``--json`` wrote and what was printed."""

    def run(arch: str, *options: object, data: Path | None = folder / "data") -> tuple[dict, str]:
        words = [*([] if data is None else [data]), "--path", folder / f"{arch}.pt", "--json", tmp_path / "result.json"]
        status = main(["eval-lm", *map(str, [*words, *options])])
        printed = capsys.readouterr()
        assert status == 0 and printed.err == "", printed.err
        return json.loads((tmp_path / "result.json").read_text()), printed.out

    return run


@pytest.fixture(scope="module")
def of_fairseq(folder) -> dict[tuple[str, str], tuple[float, int]]:
    """Loss (base 2) and number of tokens that fairseq-eval-lm gives, by architecture and mode."""
    usual = ["--user-dir", USER_DIR, "--num-workers", 0, "--tokens-per-sample", small("gmlp_lm_tiny")["max_tokens"]]
    paths = [str(folder / f"{arch}.pt") for arch in ARCHS]
    cases = [([str(word) for word in (folder / "data", *usual, *options)], paths) for options in MODES.values()]
    done = run_python(str(HELPERS / "fairseq_eval.py"), stdin=json.dumps(cases))
    assert done.rc == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    return {(arch, mode): result for (mode, arch), result in zip(itertools.product(MODES, ARCHS), results, strict=True)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_loss_is_that_of_fairseq(of_fairseq, evaluate, arch, mode):
    loss, num_tokens = of_fairseq[arch, mode]
    result, printed = evaluate(arch, *MODES[mode])
    bits = result["bits_per_token"]
    assert result["tokens"] == num_tokens > 90
    assert bits == pytest.approx(loss, rel=1e-5)
    assert result["nats_per_token"] == pytest.approx(bits * math.log(2))
    assert result["perplexity_per_token"] == pytest.approx(2**bits)
    assert f"Loss (base 2): {bits:.4f}, Perplexity: {2**bits:.2f}\n" in printed
    other, _ = evaluate(arch, *MODES[mode], "--max-tokens", 30)
    assert other["nll"] == pytest.approx(result["nll"], rel=1e-6)


def test_a_terminal_shows_how_far_it_is(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    words = [str(folder / "data"), "--path", str(folder / "smlp_tiny.pt"), "--batch-size", "10"]
    assert main(["eval-lm", *words]) == 0
    shown = capsys.readouterr().err.split("\r")
    assert [line.split()[0] for line in shown[1:]] == ["1/2", "2/2"]
    assert shown[2].split()[-1] == "positions/s" and shown[2].endswith("\n")


def test_no_older_file_passes_for_the_result_of_a_run_that_was_stopped(folder, tmp_path, monkeypatch):
    older = tmp_path / "result.json"
    older.write_text("{}\n")

    def stop(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("smlp.evaluation.scoring.score_samples", stop)
    words = ["eval-lm", str(folder / "data"), "--path", str(folder / "smlp_tiny.pt"), "--json", str(older)]
    assert main([*words, "--tokens-per-sample", "0"]) == 1 and older.exists()
    assert main(words) == 130 and not older.exists()


def test_words_and_bytes_are_those_of_the_text(folder, evaluate):
    lines = text()
    num_words, num_bytes = len(" ".join(lines).split()), (folder / "text.txt").stat().st_size
    decoded, printed = evaluate("smlp_tiny")
    assert decoded["words_and_bytes_of"] == "decoded tokens" and "words of the decoded tokens" in printed
    assert (decoded["words"], decoded["bytes"]) == (num_words, num_bytes - len("unheard") + len("<unk>"))
    given, printed = evaluate("smlp_tiny", "--text", folder / "text.txt")
    assert given["words_and_bytes_of"] == "original text" and "words of the original text" in printed
    assert (given["words"], given["line_ends"], given["bytes"]) == (num_words, len(lines), num_bytes)
    assert given["perplexity_per_word"] == pytest.approx(math.exp(given["nll"] / num_words))
    assert given["bits_per_byte"] == pytest.approx(given["nll"] / num_bytes / math.log(2))
    assert given["nll"] == decoded["nll"] and given["unknown_share"] == pytest.approx(1 / given["tokens"])
    assert "0.457% of the scored tokens are <unk>" in printed and "do not compare" in printed

    alone, _ = evaluate("smlp_tiny", "--text", folder / "text.txt", "--dict", folder / "data" / "dict.txt", data=None)
    same = given.keys() - {"text", "seconds", "tokens_per_second"}
    assert {key: alone[key] for key in same} == {key: given[key] for key in same}


def test_a_manifest_is_an_input_only_next_to_data(folder, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["eval-lm", "--path", str(folder / "smlp_tiny.pt"), "--dict", str(folder / "data" / "dict.txt")]
    words += ["--text", str(folder / "text.txt"), "--json", "manifest.json"]
    assert main(words) == 0 and json.loads((tmp_path / "manifest.json").read_text())["tokens"] == 219
    assert main([*words, str(tmp_path)]) == 1
    assert "--json manifest.json is a file that this command reads" in capsys.readouterr().err


def test_a_byte_order_mark_is_no_text(folder, evaluate, tmp_path):
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbf" + (folder / "text.txt").read_bytes())
    found = [evaluate("smlp_tiny", "--text", path)[0] for path in (folder / "text.txt", tmp_path / "marked.txt")]
    assert found[0]["nll"] == found[1]["nll"] and found[0]["bytes"] == found[1]["bytes"]


def test_only_what_was_scored_is_counted(folder, evaluate):
    blocks, printed = evaluate("smlp_partial_tiny", "--text", folder / "text.txt")
    assert blocks["tokens"] + blocks["tokens_not_scored"] == 219 and blocks["tokens"] == 162
    assert blocks["words_and_bytes_of"] == "decoded tokens"  # the text cannot say what a part of it holds
    assert blocks["words"] + blocks["line_ends"] == blocks["tokens"]  # here every word is a token
    assert "57 of 219 tokens are not scored: the first 3 positions" in printed and "not of --text" in printed
    window, printed = evaluate("smlp_partial_tiny", "--context-window", 3)
    assert window["tokens_not_scored"] == 3 and "the first 3 positions of the text choose experts" in printed
    limited, printed = evaluate("smlp_tiny", "--limit-tokens", 30)
    assert limited["tokens"] == 36 and limited["tokens_not_scored"] == 183
    assert "183 of 219 tokens are not scored: --limit-tokens 30 ends the text\n" in printed
    _, printed = evaluate("smlp_tiny", "--limit-tokens", 218, "--sample-break-mode", "complete_doc")
    assert "19 of 219 tokens are not scored: 19 are in lines longer than the context of 12 or empty ones\n" in printed
    _, printed = evaluate("smlp_partial_tiny", "--limit-tokens", 30, "--context-window", 3)
    assert "--limit-tokens 30 ends the text, and the first 3 positions of the text choose experts\n" in printed


@pytest.mark.parametrize("has_start", [0, 1])
def test_reasons_for_tokens_that_are_not_scored_are_true(has_start):
    """Of a model with a prefix of 3 positions, whose samples may begin with <s>."""
    config = SimpleNamespace(max_tokens=12, prefix_tokens=3)
    model = SimpleNamespace(decoder=SimpleNamespace(config=config), start_token=0 if has_start else 2)

    def samples(lengths, mode, window, size=None):
        stream = BinarizedTokens(np.full(sum(lengths), 5), np.array(lengths, dtype=np.int32))
        options = {"tokens_per_sample": size, "sample_break_mode": mode, "context_window": window}
        args = Namespace(**options, limit_tokens=None, parity=False)
        found, reasons = _samples(args, model, EvaluationText("text", stream, None))
        return len(stream.tokens) - found.num_scored, reasons

    first = 3 - has_start
    num_lost, (reason,) = samples([50], "none", 0)
    assert num_lost > first and "--context-window 3 all tokens but at most the first 3 of the text are" in reason
    assert samples([50], "none", 3) == (first, ["the first 3 positions of the text choose experts"])
    if has_start:  # a start symbol leaves a token to score after a prefix as long as the sample
        num_lost, (reason,) = samples([50], "none", 0, size=3)
        assert num_lost > first and "; with --context-window 3 and --tokens-per-sample above 3 all tokens but" in reason
    num_lost, reasons = samples([50], "none", 3, size=4)
    assert num_lost <= first and reasons == ["the first 3 positions of the text choose experts"]
    for window in (0, 3):
        num_lost, reasons = samples([11] * 5, "eos", window)
        assert num_lost > first and reasons == ["the first 3 positions of each input choose experts"]
    _, reasons = samples([12, 3, 13], "eos", 0)
    assert reasons[0] == f"{13 + 12 * has_start} are in lines longer than the context of {12 - has_start}"


@pytest.mark.parametrize("arch", ["smlp_tiny", "smlp_partial_tiny"])
@pytest.mark.parametrize("kind", ["empty-line", "line"])
def test_documents_add_up_to_the_whole(folder, evaluate, tmp_path, arch, kind):
    options = ["--document", kind, "--per-document", tmp_path / "documents.jsonl"]
    result, _ = evaluate(arch, "--text", folder / "text.txt", *options)
    records = [json.loads(line) for line in (tmp_path / "documents.jsonl").read_text().splitlines()]
    assert [record["index"] for record in records] == list(range(3 if kind == "empty-line" else 40))
    for name in ("tokens", "words", "line_ends", "bytes"):
        assert sum(record[name] for record in records) == result[name], name
    assert sum(record["nll"] for record in records) == pytest.approx(result["nll"], rel=1e-12)
    first = records[0]
    assert first["begins"] == " ".join(" ".join(text()[:3]).split()[:8] if kind != "line" else text()[0].split()[:8])
    assert first["perplexity_per_word"] == pytest.approx(math.exp(first["nll"] / first["words"]))
    if kind == "line":
        assert records[3]["words"] == 0 and records[3]["perplexity_per_word"] is None and records[3]["begins"] == ""


def test_a_stream_of_documents_holds_nothing_else(folder, capsys):
    words = ["eval-lm", str(folder / "data"), "--path", str(folder / "switch_lm_tiny.pt"), "--per-document", "-"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert [json.loads(line)["index"] for line in captured.out.splitlines()] == [0, 1, 2]
    assert "perplexity per word" in captured.err


def test_an_export_brings_its_dictionary(folder, evaluate, capsys):
    (folder / "dict.txt").write_bytes((folder / "data" / "dict.txt").read_bytes())
    whole, export = folder / "switch_lm_tiny.pt", folder / "exports" / "switch_lm_tiny.safetensors"
    export.parent.mkdir()
    assert main(["checkpoint", "merge", str(whole), "-o", str(export)]) == 0
    (folder / "dict.txt").unlink()
    loss = evaluate("switch_lm_tiny")[0]["bits_per_token"]
    text = ["--text", str(folder / "text.txt")]
    for data in ([], [str(folder / "data")]):
        assert main(["eval-lm", *data, *text, "--path", str(export)]) == 0
    assert capsys.readouterr().out.count(f"Loss (base 2): {loss:.4f}") == 2


def test_capacity_can_be_limited(evaluate):
    dropless, printed = evaluate("switch_lm_tiny")
    assert dropless["dropped_share"] == 0 and "were dropped" not in printed
    limited, printed = evaluate("switch_lm_tiny", "--eval-capacity-factor", 0.5)
    assert 0.5 < limited["dropped_share"] < 1 and "of the choices of experts were dropped" in printed
    assert limited["nll"] != pytest.approx(dropless["nll"], rel=1e-4)
    plenty, _ = evaluate("switch_lm_tiny", "--eval-capacity-factor", 4)
    assert plenty["nll"] == pytest.approx(dropless["nll"], rel=1e-6) and plenty["dropped_share"] == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("arch", ARCHS)
def test_half_precision(evaluate, arch, dtype):
    exact, half = (evaluate(arch, "--dtype", precision)[0]["nll"] for precision in ("fp32", dtype))
    assert half != exact and half == pytest.approx(exact, rel=0.02)


def test_a_model_that_leaks_is_not_praised(folder, evaluate):
    save(folder, "smlp_leaky_tiny")
    with pytest.warns(UserWarning, match="look better than they are"):
        result, printed = evaluate("smlp_leaky_tiny")
    assert "note: feature_routing=leaky" in printed and "look better" in result["notes"][0]


REFUSED = {
    "nothing": ([], "give a folder of binarised data, or a text file with --text"),
    "an option of fairseq": (["{data}", "--output-word-probs"], "fairseq-eval-lm --user-dir $(smlp user-dir)"),
    "no split": (["{data}", "--gen-subset", "valid"], "there is no data file"),
    "no text": (["--text", "{root}/none.txt"], "none.txt cannot be read"),
    "another text": (["{data}", "--text", "{root}/short.txt"], "--text has 1 lines, but the data have 40"),
    "empty text": (["--text", "{root}/empty.txt"], "empty.txt holds no line"),
    "mode": (["{data}", "--sample-break-mode", "sometimes"], "must be one of none, complete, complete_doc, eos"),
    "document": (["{data}", "--document", "page", "--per-document", "x"], "must be one of empty-line, line"),
    "documents of nothing": (["{data}", "--document", "line"], "names the file to write"),
    "batch": (["{data}", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
    "too long": (["{data}", "--tokens-per-sample", "13"], "--tokens-per-sample 13 must be"),
    "no capacity": (["{data}", "--eval-capacity-factor", "1"], "no expert of"),
    "negative": (["{data}", "--eval-capacity-factor=-1"], "must be at least 0 and at most 1,000,000,000, got -1"),
    "parity": (["{data}", "--parity", "--batch-size", "3"], "leave --batch-size out"),
    "parity in half": (["{data}", "--parity", "--dtype", "int8"], "leave --dtype int8 out"),
    "parity of one": (["{data}", "--parity", "--nproc", "1"], "leave --nproc 1 out"),
    "alone": (["{data}", "--spread-experts"], "--spread-experts: 1 rank and the 4 experts of"),
    "spread twice": (["{data}", "--parity", "--spread-experts"], "leave --spread-experts out"),
    "unwritable": (["{data}", "--per-document", "{root}/none/x"], "there is no folder {root}/none"),
    "a mix-up": (["{data}", "--per-document", "{root}/text.txt"], "a file of another kind exists already"),
    "a split of nothing": (["--text", "{root}/[x", "--gen-subset", "valid"], "--gen-subset valid would not be used"),
    "its own input": (["--text", "{root}/[x", "--json", "{root}/[x"], "[x is a file that this command reads: name"),
    "another dictionary": (["{root}/other"], "is not the dictionary of the model"),
    "unknown ids": (["{root}/ids"], "test.bin holds the id 24, but the model has 24 symbols"),
    "ids below 0": (["{root}/negative"], "test.bin holds the id -7, but the model has 24 symbols, counted from 0"),
}


@pytest.fixture(scope="module")
def mistakes(folder) -> Path:
    """Files that do not fit."""
    (folder / "short.txt").write_text("w1\n")
    (folder / "empty.txt").touch()
    (folder / "[x").write_text("[ w1\n")
    for name in ("other", "ids", "negative"):
        shutil.copytree(folder / "data", folder / name)
    (folder / "other" / "dict.txt").write_text("".join(f"{word} 1\n" for word in reversed(WORDS)))
    for name, wrong in (("ids", 24), ("negative", -7)):
        (folder / name / "test.bin").write_bytes(np.append(np.full(218, 5), wrong).astype(np.int32).tobytes())
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_named(mistakes, capsys, name):
    words, message = REFUSED[name][0], REFUSED[name][1].format(root=mistakes)
    words = [word.format(root=mistakes, data=mistakes / "data") for word in words]
    dictionary = [] if words[:1] == [str(mistakes / "data")] else ["--dict", str(mistakes / "data" / "dict.txt")]
    assert main(["eval-lm", *words, "--path", str(mistakes / "smlp_tiny.pt"), *dictionary]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("smlp: error: ") and message in printed and printed.count("\n") == 1, printed


def test_losses_that_depend_on_the_way_are_refused():
    cells = [ParityCell(0.0, ranks, batch, 3.0, 0.0) for ranks in (1, 2) for batch in (1, 8)]
    limited = [ParityCell(1.0, 1, 8, 3.5, 0.4)]  # may differ
    Parity((*cells[:-1], ParityCell(0.0, 2, 8, 3.00002, 0.0), *limited), ()).check()
    for loss in (3.00004, math.nan):
        with pytest.raises(UserError, match=r"with batches of 8 on 2 ranks, but 3.00000000 with batches of 1 on one"):
            Parity((*cells[:-1], ParityCell(0.0, 2, 8, loss, 0.0), *limited), ()).check()


SPREAD = ("smlp_tiny", "smlp_partial_tiny", "switch_lm_tiny")


@pytest.fixture(scope="module")
def on_ranks(folder, tmp_path_factory) -> dict[str, tuple[Finished, dict]]:
    """What runs on two ranks print and write."""
    options = {
        "two": ("switch_lm_tiny", ["--max-tokens", "30", "--nproc", "2"]),
        "switch": ("switch_lm_tiny", ["--parity"]),
        "partial": ("smlp_partial_tiny", ["--parity", "--limit-tokens", "100"]),
        "gmlp": ("gmlp_lm_tiny", ["--parity", "--limit-tokens", "100"]),
        **{f"spread {arch}": (arch, ["--max-tokens", "30", "--nproc", "2", "--spread-experts"]) for arch in SPREAD},
    }
    cases = {}
    for name, (arch, more) in options.items():
        out = tmp_path_factory.mktemp("ranks")
        words = [folder / "data", "--path", folder / f"{arch}.pt", "--json", out / "result.json", *more]
        cases[name] = {"args": ["eval-lm", *map(str, words)], "folder": str(out)}
    done = run_python(str(HELPERS / "launcher_forks.py"), stdin=json.dumps(cases), timeout=110)
    assert done.rc == 0, done.stderr
    found = {}
    for name, status in json.loads(done.stdout).items():
        out = Path(cases[name]["folder"])
        finished = Finished(status, (out / "out").read_text(), (out / "err").read_text())
        assert finished.rc == 0, finished.stderr
        found[name] = finished, json.loads((out / "result.json").read_text())
    return found


@pytest.mark.slow
def test_ranks_share_the_work_and_give_the_same(on_ranks, evaluate):
    one, two = evaluate("switch_lm_tiny", "--max-tokens", 30)[0], on_ranks["two"][1]
    different = {"seconds", "tokens_per_second"}
    assert {k: v for k, v in one.items() if k not in different} == {k: v for k, v in two.items() if k not in different}
    assert on_ranks["two"][0].stdout.count("Loss (base 2)") == 1


@pytest.mark.slow
@pytest.mark.parametrize("arch", SPREAD)
def test_ranks_share_the_experts(on_ranks, evaluate, arch):
    """With an odd number of batches, so that one rank computes for the other at the end."""
    one, two = evaluate(arch, "--max-tokens", 30)[0], on_ranks[f"spread {arch}"][1]
    assert two["nats_per_token"] == pytest.approx(one["nats_per_token"], rel=1e-6)
    assert all(two[key] == one[key] for key in ("tokens_not_scored", "dropped_share"))


@pytest.mark.slow
def test_parity(on_ranks, evaluate):
    finished, result = on_ranks["switch"]
    cells = result["cells"]
    ways = [(cell["capacity_factor"], cell["num_ranks"], cell["batch_size"]) for cell in cells]
    assert ways == [(factor, ranks, batch) for factor in (0, 1) for ranks in (1, 2) for batch in (1, 8)]
    dropless, limited = cells[:4], cells[4:]
    loss = evaluate("switch_lm_tiny")[0]["nats_per_token"]
    assert all(cell["loss"] == pytest.approx(loss, rel=1e-5) and cell["dropped_share"] == 0 for cell in dropless)
    assert all(abs(cell["relative_difference"]) > 1e-4 and cell["dropped_share"] > 0.1 for cell in limited)
    expected = evaluate("switch_lm_tiny", "--eval-capacity-factor", 1, "--batch-size", 8)[0]
    for cell in limited[1::2]:
        assert cell["loss"] == pytest.approx(expected["nats_per_token"], rel=1e-5)
        assert cell["dropped_share"] == pytest.approx(expected["dropped_share"])
    assert (
        finished.stdout.count("\n") == 10
        and finished.stdout.startswith("219 tokens of ")
        and "what exceeds 1 k*N/E" in finished.stdout
    )


@pytest.mark.slow
def test_parity_leaves_out_what_a_model_does_not_have(on_ranks):
    features, dense = (on_ranks[name] for name in ("partial", "gmlp"))
    assert [(cell["num_ranks"], cell["batch_size"]) for cell in features[1]["cells"]] == [
        (1, 1),
        (1, 8),
        (2, 1),
        (2, 8),
    ]
    assert [(cell["num_ranks"], cell["batch_size"]) for cell in dense[1]["cells"]] == [(1, 1), (1, 8)]
    assert "left out: capacity: no token is ever dropped" in features[0].stdout
    assert "left out: 2 ranks: the model has no experts" in dense[0].stdout
