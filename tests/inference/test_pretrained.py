"""Checkpoints as plain models, and the commands that use them: generate and leak-test."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from sparse_references import unmasked_projection
from tiny_checkpoints import WORDS, write_checkpoint

import smlp
from smlp.checkpoint.load import load_pretrained
from smlp.cli.main import main
from smlp.cli.options import load_any_model, load_model
from smlp.fairseq_compat.loading import check_dictionary_of
from smlp.inference.generation import Sampling
from smlp.moe.experts import expert_parameters
from smlp.parallel import ExpertLayout, LocalGroup, Ranks, cut_state
from smlp.text.tokenizer import Tokenizer, Vocabulary
from smlp.text.tokenizer_files import RECORD, record_of


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint as fairseq-train writes it, with dict.txt next to it."""
    return write_checkpoint(tmp_path, WORDS)


def test_the_same_model_comes_back(checkpoint):
    path, decoder = checkpoint
    model = load_pretrained(path)
    assert not model.training and model.decoder.config == decoder.config
    tokens = torch.randint(2, 14, (2, 12))
    assert torch.equal(model(tokens).logits, decoder(tokens).logits)
    assert model.vocabulary.symbols[4:] == WORDS


@pytest.mark.parametrize("arch", ["smlp_tiny", "dense_lm_tiny", "hash_lm_tiny", "amlp_mlm_tiny"])
@pytest.mark.parametrize("kind", ["checkpoint", "pt", "safetensors"])
def test_weights_that_stay_in_the_file(arch, kind, tmp_path):
    """They are those of the file, can be changed without changing it, and survive its replacement."""
    settings = {"num_sparse_layers": 0} if "mlm" in arch or "dense" in arch else {}
    path, core = write_checkpoint(tmp_path, WORDS, arch, **settings)
    if kind != "checkpoint":
        exported = tmp_path / f"model.{kind}"
        assert main(["checkpoint", "merge", str(path), "-o", str(exported)]) == 0
        path = exported
    before = path.read_bytes()
    model = load_pretrained(path, mapped=True)
    tokens = torch.randint(2, 14, (2, 12))
    want = core(tokens)
    assert torch.equal(getattr(model.core(tokens), "logits", model.core(tokens)), getattr(want, "logits", want))
    weights = dict(model.core.named_parameters())
    assert all(weight.requires_grad and weight.is_leaf for weight in weights.values())
    with open("/proc/self/maps") as maps:
        assert any(line.rstrip().endswith(str(path)) for line in maps)
    with torch.no_grad():
        for weight in weights.values():
            weight.add_(1.0)
    assert path.read_bytes() == before
    again = load_pretrained(path, mapped=True)
    path.rename(tmp_path / "other")
    path.write_bytes(b"replaced")
    for name, weight in again.core.named_parameters():
        assert torch.equal(weight, dict(core.named_parameters())[name]), name


@pytest.mark.parametrize("load", [load_model, load_any_model])
def test_commands_leave_weights_in_the_file(load, checkpoint):
    path, decoder = checkpoint
    options = {"path": str(path), "dict": None, "tokenizer": None, "device": "cpu", "dtype": "fp32"}
    model = load(Namespace(command="generate", **options))
    with open("/proc/self/maps") as maps:
        assert any(line.rstrip().endswith(str(path)) for line in maps)
    assert torch.equal(model.core.embedding.weight, decoder.embedding.weight)


def test_a_symbol_stands_once_in_a_dictionary(tmp_path):
    for lines, number in (("a 1\nb 1\na 1\n", 3), ("<unk> 1\n", 1)):
        (tmp_path / "dict.txt").write_text(lines)
        with pytest.raises(smlp.UserError, match=rf"dict.txt, line {number}: the symbol '.*' occurs twice"):
            Vocabulary.load(tmp_path / "dict.txt")
    (tmp_path / "dict.txt").write_text("a ²\n", encoding="utf-8")  # a digit, but no number
    with pytest.raises(smlp.UserError, match=r"dict.txt, line 1: expected 'symbol count', got 'a ²'"):
        Vocabulary.load(tmp_path / "dict.txt")
    (tmp_path / "dict.txt").write_text("a 1\na 1 #fairseq:overwrite\n")
    assert len(Vocabulary.load(tmp_path / "dict.txt")) == 6
    (tmp_path / "dict.txt").write_text("a 1 \nb 1\t\na 1 #fairseq:overwrite \n")  # which fairseq reads too
    assert Vocabulary.load(tmp_path / "dict.txt").symbols[4:] == ["a", "b", "a"]


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("kind", "num_ranks"), [("whole", 2), ("parts", 2), ("parts", 4)])
def test_a_rank_reads_its_own_experts(kind, num_ranks, mapped, request):
    """They stay in the file if they lie in one, as those of a part do."""
    path, layout = request.getfixturevalue(kind), ExpertLayout(4, world_size=num_ranks, rank=1)
    core = load_pretrained(path).core
    alone = LocalGroup()
    own = load_pretrained(path, mapped=mapped, ranks_for=lambda config: Ranks(layout, alone, alone, alone)).core
    names = [name for name, _, _ in expert_parameters(core)]
    want, found = cut_state(core.state_dict(), names, layout), own.state_dict()
    assert names and all(torch.equal(found[name], tensor) for name, tensor in want.items())
    stay = set(found) - (set(names) if (kind, num_ranks) == ("parts", 2) else set())
    in_file = {name for name, tensor in found.items() if mapped_file(tensor).startswith(str(path.parent))}
    assert in_file == (stay if mapped else set())


def mapped_file(tensor):
    """The file in which the tensor's memory lies, or an empty text."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            found = line.split(maxsplit=5)[5:]
            return found[0] if found and found[0].startswith("/") else ""
    return ""


def test_dictionary_with_the_data_or_by_name(checkpoint, tmp_path):
    path, _ = checkpoint
    dictionary = tmp_path / "dict.txt"
    (tmp_path / "data").mkdir()
    dictionary.rename(tmp_path / "data" / "dict.txt")
    assert len(load_pretrained(path).vocabulary) == 14
    (tmp_path / "data" / "input0").mkdir()  # of sentence_prediction
    (tmp_path / "data" / "dict.txt").rename(tmp_path / "data" / "input0" / "dict.txt")
    assert len(load_pretrained(path).vocabulary) == 14
    (tmp_path / "data" / "input0" / "dict.txt").rename(tmp_path / "words.txt")
    with pytest.raises(smlp.UserError, match=r"no dict\.txt beside"):
        load_pretrained(path)
    (tmp_path / "dict.txt").write_text("damaged\n")
    assert len(load_pretrained(path, dictionary=tmp_path / "words.txt").vocabulary) == 14


def test_a_dictionary_in_another_order_is_refused(checkpoint, tmp_path):
    path, _ = checkpoint
    lines = (tmp_path / "dict.txt").read_text().splitlines(keepends=True)
    (tmp_path / "same.txt").write_text("".join(lines))
    (tmp_path / "turned.txt").write_text("".join(reversed(lines)))
    assert len(load_pretrained(path, dictionary=tmp_path / "same.txt").vocabulary) == 14
    with pytest.raises(
        smlp.UserError, match=r"turned\.txt has other symbols than .*dict\.txt, which the model was trained"
    ):
        load_pretrained(path, dictionary=tmp_path / "turned.txt")


def test_the_dictionary_of_another_project_is_refused(checkpoint, tmp_path):
    """A checkpoint that was copied alone finds another dictionary of its size under the path of its data."""
    path, _ = checkpoint
    state = torch.load(path, weights_only=False)
    own = Vocabulary.load(tmp_path / "dict.txt")
    state["extra_state"] = {**(state.get("extra_state") or {}), RECORD: record_of(own.symbols)}
    closed = "x" * 300  # a folder that cannot be looked at, as one that may not be entered
    state["cfg"]["task"]["data"] = f"{closed}:{tmp_path / 'data-bin'}"
    torch.save(state, path)
    assert load_pretrained(path).vocabulary.symbols == own.symbols
    (tmp_path / "data-bin").mkdir()
    lines = (tmp_path / "dict.txt").read_text().splitlines(keepends=True)
    (tmp_path / "data-bin" / "dict.txt").write_text("".join(reversed(lines)))
    (tmp_path / "dict.txt").rename(tmp_path / "own.txt")
    with pytest.raises(smlp.UserError, match=r"data-bin/dict\.txt has other symbols than the one that .* was trained"):
        load_pretrained(path)
    with pytest.raises(smlp.UserError, match=r"was trained with: use that one$"):
        load_pretrained(path, tmp_path / "data-bin" / "dict.txt")
    with pytest.raises(smlp.UserError, match="was trained with another dictionary than that of the data"):
        check_dictionary_of(str(path), tmp_path / "data-bin", Namespace(other_dictionary=False))
    assert load_pretrained(path, dictionary=tmp_path / "own.txt").vocabulary.symbols == own.symbols


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-3000]), ["truncated", "bytes"]),
        (lambda path: path.write_bytes(b""), ["(0 bytes)", "truncated"]),
        (lambda path: path.write_text("not a checkpoint"), ["(16 bytes)"]),
        (lambda path: path.unlink(), ["there is no checkpoint"]),
        (lambda path: torch.save({"weights": 1}, path), ["not a checkpoint of fairseq-train"]),
        (lambda path: torch.save({"model": {"x": torch.ones(1)}, "cfg": {"model": {"_name": "bart"}}}, path), ["bart"]),
        (lambda path: (path.parent / "dict.txt").write_text("the 1\n"), ["dict.txt has 5 symbols", "14"]),
        (lambda path: (path.parent / "dict.txt").write_text("the\n"), ["dict.txt, line 1", "'the'"]),
        (lambda path: (path.parent / "dict.txt").write_bytes(b"\xff 1\n"), ["dict.txt", "UTF-8"]),
    ],
)
def test_damage_is_named_in_one_line(checkpoint, damage, words, capsys):
    path, _ = checkpoint
    damage(path)
    assert main(["generate", "--path", str(path), "--prompt", "the s1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("smlp: error: ") and error.count("\n") == 1, error
    assert all(word in error for word in [path.parent.name, *words]), error


def test_what_is_no_text_is_refused(checkpoint):
    model = load_pretrained(checkpoint[0])
    calls = {
        "prompts must be a list of strings, got b'the s1'": lambda: model.generate(b"the s1"),
        "prompts must be a list of strings, got None": lambda: model.generate(None),
        "prompts must be a list of strings, got 'the s1'": lambda: model.continuations("the s1"),
        "a text must be a string, got 1": lambda: model.generate([1, 2]),
        "a text must be a string, got b'the s1'": lambda: model.generate(["the", b"the s1"]),
        r"a text must be a string, got \[3\]": lambda: model.stream([3]),
        "a text must be a string, got 7": lambda: model.tokenize(7),
        "texts to score must be .*, got \\('the', 8\\)": lambda: model.score([("the", 8)]),
        "texts to score must be strings, or pairs of a context and a string, got 5": lambda: model.score(5),
        "texts to score must be strings, or pairs of .*, got \\('a', 'b', 'c'\\)": lambda: model.score(("a", "b", "c")),
        "newline must be one of eos, space, got 'tab'": lambda: model.score("the s1", newline="tab"),
        "ids must be whole numbers from 0 to 13, got -1": lambda: model.detokenize([4, -1]),
        "ids must be whole numbers from 0 to 13, got 14": lambda: model.detokenize([14]),
        "ids must be whole numbers from 0 to 13, got 'a'": lambda: model.detokenize("abc"),
        "temperature must be of type float, got '1'": lambda: model.generate("the", 3, temperature="1"),
        "top_k must be of type int, got 2.5": lambda: model.generate("the", 3, top_k=2.5),
        "max_tokens must be of type int, got 3.5": lambda: model.generate("the", 3.5),
        "beam size must be of type int, got 2.5": lambda: model.generate("the", 3, beam=2.5),
        "greedy must be True or False, got 'no'": lambda: model.generate("the", 3, greedy="no"),
        "method must be a Sampling or a BeamSearch, got 'greedy'": lambda: model.generate("the", 3, "greedy"),
        "num_return must be from 1 to 65536, got 2.0": lambda: model.generate("the", 3, num_return=2.0),
        "batch_size must be a whole number of at least 1, got 1.5": lambda: model.generate("the", 3, batch_size=1.5),
        "a stop string must be a string, got 5": lambda: model.generate("the", 3, stop=[5]),
        "the name of the architecture must be text, got None": lambda: smlp.build(None),
    }
    for message, call in calls.items():
        with pytest.raises(smlp.UserError, match=f"^{message}$"):
            call()
    assert model.detokenize(torch.tensor([4, 5])) == model.detokenize([4, 5])
    assert model.generate(iter(["the s1"]), 3, seed=2) == model.generate(["the s1"], 3, seed=2)


def test_generate_continues_prompts(checkpoint, tmp_path, capsys):
    path, _ = checkpoint
    model = load_pretrained(path)
    expected = model.generate("the s1", 5, Sampling(temperature=0))
    command = ["generate", "--path", str(path), "--greedy", "--max-tokens", "5"]
    assert main([*command, "--prompt", "the s1"]) == 0
    assert capsys.readouterr().out == f"the s1{expected}\n"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the s1\na o2\n")
    assert main([*command, "--file", str(prompts)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("the s1 ") and lines[1].startswith("a o2 ")
    assert "madeupword" not in model.generate("", 11, Sampling(temperature=5.0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "the", "--max-tokens", "12"], ["2 prompt tokens", "max_tokens=12"]),
        (["--prompt", "the", "--max-tokens", "0"], ["max_tokens", "0"]),
        (["--prompt", "the", "--top-p", "2"], ["top_p", "2"]),
        (["--file", "missing.txt"], ["missing.txt"]),
        (["--file", "latin1.txt"], ["latin1.txt", "line 2", "UTF-8"]),
        (["--file", "empty.txt"], ["empty.txt", "0 lines"]),
    ],
)
def test_generate_refuses_in_one_line(checkpoint, arguments, words, capsys, monkeypatch):
    path, _ = checkpoint
    monkeypatch.chdir(path.parent)
    (path.parent / "latin1.txt").write_bytes(b"the\ncaf\xe9\n")
    (path.parent / "empty.txt").write_bytes(b"")
    assert main(["generate", "--path", str(path), *arguments]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words), error


def test_sliding_writes_past_the_context(checkpoint, capsys):
    path, _ = checkpoint
    assert main(["generate", "--path", str(path), "--prompt", "the", "--max-tokens", "30", "--slide", "--greedy"]) == 0
    assert len(capsys.readouterr().out.split()) > 12


def test_leak_test_passes_on_a_checkpoint_and_an_architecture(checkpoint, tmp_path, capsys):
    path, _ = checkpoint
    result = tmp_path / "result.json"
    assert main(["leak-test", "--path", str(path), "--json", str(result)]) == 0
    report = json.loads(result.read_text())
    assert report["passed"] and len(report["results"]) == 6
    assert "expected: routed by batch" in capsys.readouterr().out
    assert main(["leak-test", "--arch", "gmlp_lm_tiny", "--tokens", "16"]) == 0
    assert "H=64, 9 + 0 blocks" in capsys.readouterr().out
    for words, said in (
        (["--path", str(path), "--width", "8"], "--width is for --arch"),
        (["--arch", "gmlp_lm_tiny", "--dict", "d"], "--dict d would not be used: it is for --path"),
        (["--arch", "gmlp_lm_tiny", "--tokenizer", "t"], "--tokenizer t would not be used: it is for --path"),
        (["--path", str(path), "--tokenizer", "t"], "there is no SentencePiece model t"),
    ):
        assert main(["leak-test", *words]) == 1
        assert said in capsys.readouterr().err


def test_leak_test_fails_on_a_leak(checkpoint, capsys, monkeypatch):
    path, _ = checkpoint
    from smlp.nn import layers

    monkeypatch.setattr(layers, "causal_spatial_projection", unmasked_projection)
    assert main(["leak-test", "--path", str(path)]) == 1
    assert "LEAK: a later token changes an earlier prediction" in capsys.readouterr().out


def test_unknown_architecture(capsys):
    assert main(["leak-test", "--arch", "smlp_tinny"]) == 1
    assert "did you mean 'smlp_tiny'" in capsys.readouterr().err


def test_tokens_and_text_with_sentencepiece(tmp_path):
    import sentencepiece

    text = tmp_path / "text.txt"
    text.write_text("the old man and the sea\nthe young man and the old sea\n" * 20)
    model = tmp_path / "sentencepiece"
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(model), vocab_size=40, hard_vocab_limit=False, minloglevel=2
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=f"{model}.model")
    vocabulary = Vocabulary(pieces.id_to_piece(i) for i in range(pieces.get_piece_size()) if not pieces.is_control(i))
    tokenizer = Tokenizer(vocabulary, f"{model}.model")
    ids = tokenizer.encode("the young sea and the man")
    assert vocabulary.unk not in ids
    assert tokenizer.decode([*ids, vocabulary.eos, *ids]) == "the young sea and the man\nthe young sea and the man"
    assert tokenizer.encode("the 东")[-1] == vocabulary.unk
    with pytest.raises(smlp.UserError, match="is not a SentencePiece model"):
        Tokenizer(vocabulary, text)
    with pytest.raises(smlp.UserError, match="there is no SentencePiece model"):
        Tokenizer(vocabulary, tmp_path / "none.model")
    os.mkfifo(tmp_path / "pipe.model")
    with pytest.raises(smlp.UserError, match="is not a regular file but a named pipe: name a SentencePiece model"):
        Tokenizer(vocabulary, tmp_path / "pipe.model")
    with pytest.raises(smlp.UserError, match=r"no piece of .*\.model is in the dictionary of 5 symbols"):
        Tokenizer(Vocabulary(["another"]), f"{model}.model")


def test_pieces_without_their_model_are_refused(checkpoint, capsys):
    path, _ = checkpoint
    lines = [f"\u2581{word} 1\n" for word in WORDS]
    (path.parent / "dict.txt").write_text("".join(lines), encoding="utf-8")
    assert main(["generate", "--path", str(path), "--prompt", "the s1"]) == 1
    assert "no sentencepiece.model" in capsys.readouterr().err


def test_a_model_trained_with_a_start_symbol_is_prompted_with_it(checkpoint):
    path, _ = checkpoint
    assert load_pretrained(path).start_token == Vocabulary.eos
    state = torch.load(path, weights_only=True)
    state["cfg"]["model"].update(add_bos_token=True, tokens_per_sample=11)
    torch.save(state, path)
    model = load_pretrained(path)
    assert model.start_token == Vocabulary.bos and model.decoder.config.max_tokens == 12


def test_a_stream_may_be_left_unfinished(checkpoint):
    """When Python ends, the generator is closed after torch, and nothing of torch may then be needed."""
    script = f"import smlp\nstream = smlp.load_pretrained({str(checkpoint[0])!r}).stream('the s1', 5)\nnext(stream)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert "Traceback" not in run.stderr


def test_text_comes_piece_by_piece(checkpoint):
    model = load_pretrained(checkpoint[0])
    calls = []
    model.decoder.norm.register_forward_hook(lambda *_: calls.append(1))
    stream = model.stream("the s1", 5, Sampling(temperature=0))
    assert len(calls) == 0
    next(stream)
    assert len(calls) == 1, "the first piece must not wait for the second"


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_here_is_named(checkpoint, device, capsys):
    assert main(["generate", "--path", str(checkpoint[0]), "--prompt", "the", "--device", device]) == 1
    captured = capsys.readouterr()
    assert f"--device {device}" in captured.err and captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize("options", [["--positions", "0"], ["--tokens", "1"], ["--tokens", "0"]])
def test_a_leak_test_of_nothing_is_refused(options, capsys):
    assert main(["leak-test", "--arch", "gmlp_lm_tiny", *options]) == 1
    assert capsys.readouterr().err.startswith("smlp: error: ")


def test_an_older_report_of_a_leak_test_that_is_stopped_is_gone(checkpoint, tmp_path, monkeypatch):
    def stop(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("smlp.evaluation.leak.leak_test", stop)
    older = tmp_path / "leak.json"
    older.write_text("{}\n")
    assert main(["leak-test", "--path", str(checkpoint[0]), "--json", str(older)]) == 130 and not older.exists()


def test_an_unwritable_report_is_named(checkpoint, capsys):
    assert main(["leak-test", "--path", str(checkpoint[0]), "--json", "no/such/folder.json"]) == 1
    assert "cannot write --json no/such/folder.json" in capsys.readouterr().err
