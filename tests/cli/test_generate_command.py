"""``smlp generate``: files of prompts, JSON lines, options that do not go together, and the prompt loop."""

import io
import json
import os
import resource
import signal
import threading

import pytest
from tiny_checkpoints import WORDS, write_checkpoint

import smlp
from data_prep.tokenize.models import pieces_of, train_sentencepiece
from smlp.cli import prompt_loop
from smlp.cli.main import main
from smlp.inference.generation import Text, TextWriter
from smlp.text.tokenizer import Vocabulary


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("words"), WORDS)[0])


@pytest.fixture(scope="module")
def lm(path):
    return smlp.load_pretrained(path)


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("the s1\na o2 and the s2\n\nthe\n")
    return str(file)


def test_json_lines_say_everything(path, lm, prompts, tmp_path, capsys):
    output = tmp_path / "texts.jsonl"
    command = ["generate", "--path", path, "--file", prompts, "--max-tokens", "5", "--output", str(output)]
    assert main([*command, "--num-return", "3", "--temperature", "2", "--stop", "o1", "--stop", "\\n"]) == 0
    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["index"], row["draw"]) for row in rows] == [(i, d) for i in range(4) for d in range(3)]
    settings = {"temperature": 2.0, "num_return": 3, "stop": ["o1", "\n"]}
    expected = list(lm.continuations(["the s1", "a o2 and the s2", "", "the"], 5, **settings))
    for row, continuation in zip(rows, (c for found in expected for c in found), strict=True):
        assert (row["prompt"], row["text"]) == (continuation.prompt, continuation.text)
        assert row["tokens"] == continuation.tokens and row["num_tokens"] == len(row["tokens"])
        assert row["log_prob"] == pytest.approx(sum(row["token_log_probs"])) and row["log_prob"] < 0
        assert row["finish"] == continuation.finish and row["score"] is None
        assert (
            row["settings"]["seed"] == 1 and row["settings"]["temperature"] == 2.0 and row["settings"]["path"] == path
        )
    assert {row["finish"] for row in rows} == {"stop", "length"}
    tokens = sum(row["num_tokens"] for row in rows)
    assert f"{output}: 12 texts for 4 prompts, {tokens} tokens in" in printed

    assert main([*command[:-1], "/dev/stdout"]) == 0
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 4  # and nothing else
    assert main([*command[:-1], "-", "--beam", "3"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["the s1", "a o2 and the s2", "", "the"]
    assert all(row["score"] < 0 and row["settings"]["method"] == "beam search" for row in rows)


def test_a_full_disk_leaves_whole_lines(path, prompts, tmp_path, capsys):
    """As a full disk does, the limit lets a part of the last line in."""
    output, limits = tmp_path / "texts.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    command = ["generate", "--path", path, "--file", prompts, "--max-tokens", "5", "--output", str(output)]
    assert main(command) == 0
    lines = output.read_bytes().splitlines(keepends=True)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(lines[0]) + 20, limits[1]))
    try:
        assert main(command) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert f"cannot write --output {output}: " in capsys.readouterr().err
    assert output.read_bytes() == lines[0]


def test_several_texts_have_a_line_each(path, lm, prompts, capsys):
    assert main(["generate", "--path", path, "--file", prompts, "--max-tokens", "4", "--seed", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    texts = lm.generate(["the s1", "a o2 and the s2", "", "the"], 4, seed=5)
    assert lines[1] == ("a o2 and the s2" + texts[1]).replace("\n", " / ") and len(lines) == 4
    assert main(["generate", "--path", path, "--prompt", "the", "--max-tokens", "4", "--beam", "3"]) == 0
    assert capsys.readouterr().out == "the" + lm.generate("the", 4, beam=3) + "\n"
    assert main(["generate", "--path", path, "--prompt", "the", "--max-tokens", "4", "--num-return", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_half_precision(path, capsys):
    exact, half = [], []
    for dtype, values in (("fp32", exact), ("bf16", half)):
        words = ["--prompt", "the s1", "--max-tokens", "1", "--greedy", "--output", "-", "--dtype", dtype]
        assert main(["generate", "--path", path, *words]) == 0
        values += json.loads(capsys.readouterr().out)["token_log_probs"]
    assert half != exact and half == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--beam", "3", "--temperature", "0.5"], ["beam=3", "temperature"]),
        (["--beam", "3", "--greedy"], ["beam=3", "greedy"]),
        (["--beam", "3", "--slide"], ["sliding", "beam search"]),
        (["--beam", "3", "--stop", "a"], ["stop strings", "beam search"]),
        (["--beam", "3", "--num-return", "4"], ["num_return=4", "beam=3"]),
        (["--greedy", "--num-return", "2"], ["num_return=2", "greedy"]),
        (["--greedy", "--top-p", "0.5"], ["greedy", "top_p"]),
        (["--length-penalty", "0.5"], ["length_penalty", "beam"]),
        (["--min-tokens", "3"], ["min_tokens=3", "stop_at_eos"]),
        (["--slide", "--when-full", "stop"], ["--slide", "--when-full stop"]),
        (["--batch-size", "0"], ["--batch-size", "0"]),
        (["--output", "no/such/folder/texts.jsonl"], ["--output no/such/folder/texts.jsonl"]),
        (["--output", "notes.txt"], ["--output notes.txt", "another kind"]),
        (["--output", "texts.jsonl", "--max-tokens", "10"], ["prompt 2: 6 prompt tokens", "max_tokens=12"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else None,
)
def test_options_that_do_not_go_together(path, prompts, options, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "texts.jsonl").write_text("{}\n")
    assert main(["generate", "--path", path, "--file", prompts, "--max-tokens", "3", *options]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("smlp: error: ") and captured.err.count("\n") == 1 and captured.out == ""
    assert all(word in captured.err for word in words), captured.err
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / "texts.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "1e308"], "temperature must be 0 or from 1e-30 to 1e+30, got 1e+308"),
        (["--temperature", "1e-45"], "temperature must be 0 or from 1e-30"),
        (["--temperature", "nan"], "temperature must be 0 or from 1e-30"),
        (["--repetition-penalty", "1e39"], "repetition_penalty must be from 1 to 1e+30, got 1e+39"),
        (["--beam", "3", "--length-penalty", "1e308"], "length_penalty must be from -50 to 50"),
        (["--beam", "3", "--length-penalty=-1e308"], "length_penalty must be from -50 to 50"),
        (["--beam", "14"], "beam=14 must be below the 14 symbols of the dictionary"),
        (["--num-return", "100000000"], "num_return must be from 1 to 65536, got 100000000"),
        (["--max-tokens", "99999999999999999999", "--slide"], "max_tokens must be from 1 to 2147483647"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--dict", "{folder}"], "dictionary {folder} cannot be read: Is a directory"),
        (["--dict", "{pipe}"], "dictionary {pipe} cannot be read: nothing writes to this pipe"),
        (["--file", "{pipe}"], "cannot read prompts from {pipe}: nothing writes to this pipe"),
        (["--output", "{pipe}"], "cannot write --output {pipe}: nothing reads from this pipe"),
        (["--file", "{prompts}", "--output", "{link}"], "--output {link} is a file that this command reads"),
        (["--file", "{folder}"], "cannot read prompts from {folder}: Is a directory"),
        (["--prompt", "the \udcff"], "the text 'the \\udcff' has a lone surrogate, U+DCFF, at character 4"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_one_sentence(path, options, words, capsys, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "prompts").write_text("[the s1\n")
    os.link(tmp_path / "prompts", tmp_path / "link")
    names = {name: tmp_path / name for name in ("pipe", "prompts", "link")} | {"folder": tmp_path}
    options = [option.format(**names) for option in options]
    prompt = [] if "--prompt" in options or "--file" in options else ["--prompt", "the"]
    assert main(["generate", "--path", path, "--max-tokens", "3", *prompt, *options]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("smlp: error: ") and captured.err.count("\n") == 1 and captured.out == ""
    assert words.format(**names) in captured.err, captured.err
    assert (tmp_path / "prompts").read_text() == "[the s1\n"


def test_marks_and_ends_of_lines_are_no_prompt(path, tmp_path, capsys):
    (tmp_path / "prompts").write_bytes(b"\xef\xbb\xbfthe s1\r\nthe\ra o2\n")
    command = ["generate", "--path", path, "--max-tokens", "2", "--output", "-", "--file", str(tmp_path / "prompts")]
    assert main(command) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["the s1", "the", "a o2"]
    (tmp_path / "prompts").write_bytes(b"\xef\xbb\xbfone\n\xfftwo\n")
    assert main(command) == 1
    assert "prompts is not UTF-8 text: line 2, byte 7" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--temperature", "1e-30"], ["--temperature", "1e30"], ["--beam", "13"]])
def test_settings_at_their_bounds(path, lm, options, capsys):
    """The coldest temperature is greedy."""
    assert main(["generate", "--path", path, "--max-tokens", "5", "--prompt", "the", *options]) == 0
    written = capsys.readouterr().out
    assert options != ["--temperature", "1e-30"] or written == "the" + lm.generate("the", 5, greedy=True) + "\n"


def test_prompts_may_come_from_a_pipe(path, capsys, tmp_path):
    """As with <(command) in a shell, also where the writer is late."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    keeper = os.open(pipe, os.O_RDWR)

    def write():
        os.write(keeper, b"the s1\nthe\n")
        os.close(keeper)

    timer = threading.Timer(0.2, write)
    timer.start()
    assert main(["generate", "--path", path, "--max-tokens", "3", "--file", str(pipe), "--output", "-"]) == 0
    timer.join()
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == ["the s1", "the"]


def test_texts_may_go_to_a_pipe(path, capsys, tmp_path):
    """As with >(command) in a shell; it is read to the end, which comes with that of the process."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert main(["generate", "--path", path, "--max-tokens", "3", "--prompt", "the", "--output", str(pipe)]) == 0
    assert json.loads(os.read(reader, 1 << 16))["prompt"] == "the"
    with pytest.raises(BlockingIOError):  # still open
        os.read(reader, 1)
    os.close(reader)


def test_what_slides_out_of_a_prompt_is_said(path, prompts, capsys):
    command = ["generate", "--path", path, "--max-tokens", "2", "--slide"]
    assert main([*command, "--prompt", "the s1 " * 9]) == 0
    said = (
        "the model's context of 12 tokens is too short for {}: of its {} tokens (start symbol included), the first {} "
    )
    assert said.format("the prompt", 19, 7) in capsys.readouterr().err
    with open(prompts, "a") as file:
        file.write("the " * 13 + "\n" + "the " * 20 + "\n")
    assert main([*command, "--file", prompts, "--output", "-"]) == 0
    captured = capsys.readouterr()
    assert (
        said.format("2 of 6 prompts; the longest is prompt 6", 21, 9) in captured.err and captured.err.count("\n") == 1
    )
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [row["num_cut_tokens"] for row in rows] == [0, 0, 0, 0, 2, 9]
    assert main([*command, "--prompt", "the"]) == 0
    assert capsys.readouterr().err == ""


def talk(path, lines, *options, monkeypatch, capsys):
    """What the loop prints after each prompt sign."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert main(["generate", "--path", path, "--interactive", *options]) == 0
    first, *answers = capsys.readouterr().out.split("> ")
    assert first == ""
    return answers


def test_the_text_so_far_is_the_context(path, lm, monkeypatch, capsys):
    said = talk(path, ["the s1", "", "a"], "--greedy", "--max-tokens", "2", monkeypatch=monkeypatch, capsys=capsys)
    first = next(lm.continuations(["the s1"], 2, greedy=True))[0]
    both = next(lm.continuations(["the s1"], 4, greedy=True))[0]
    assert said[0] == first.text.lstrip() + "\n"
    assert said[1] == lm.tokenizer.decode(both.tokens[2:]) + "\n"
    tokens = [*lm.tokenize("the s1"), *both.tokens, Vocabulary.eos, *lm.tokenize("a")]
    *_, (text, _) = lm.writer(2, greedy=True).follow([[lm.start_token, *tokens]])
    assert said[2] == lm.tokenizer.decode(text.tokens) + "\n"
    assert said[3] == "\n" and len(said) == 4, "the end of input ends it"


def test_commands(path, monkeypatch, capsys):
    lines = ["/help", "/set temperature 0", "/set max_tokens 3", "the", "/reset", "the", "/set stop_at_eos on", "/set"]
    lines += ["/set stop o1 \\n", "/set stop", "/dance", "/set height 3", "/set top_k many", "/set top_p 7"]
    said = talk(path, [*lines, "/quit now", "the"], monkeypatch=monkeypatch, capsys=capsys)
    assert len(said) == len(lines) + 1 and said[-1] == ""
    assert "/reset" in said[0] and "temperature 0.0, " in said[1] and "max_tokens 3" in said[2]
    assert said[3] == said[5] and len(said[3].split()) <= 3 and "forgotten" in said[4]
    assert "stop_at_eos on" in said[7] and "stop 'o1 \\n'" in said[8] and "stop nothing" in said[9]
    for answer, word in zip(said[10:14], ["/dance", "'height'", "'many'", "top_p must be in"], strict=True):
        assert word in answer and answer.count("\n") == 1


def test_the_fewest_tokens_are_shown_and_kept(path, monkeypatch, capsys):
    lines = [
        "/set stop_at_eos on",
        "/set max_tokens 3",
        "/set min_tokens 2",
        "/set max_tokens 3",
        "/set stop_at_eos off",
    ]
    options = ["--stop-at-eos", "--min-tokens", "4", "--max-tokens", "5"]
    said = talk(path, lines, *options, monkeypatch=monkeypatch, capsys=capsys)
    assert "max_tokens 5, min_tokens 4, stop_at_eos on" in said[0]
    assert "min_tokens must be between 0 and max_tokens=3, got 4" in said[1]
    assert "max_tokens 3, min_tokens 2" in said[3] and "min_tokens 0, stop_at_eos off" in said[4]


def test_a_full_context_forgets_the_earlier_half(path, monkeypatch, capsys):
    said = talk(path, ["the s1 v1"] * 4, "--max-tokens", "4", monkeypatch=monkeypatch, capsys=capsys)
    # 4 + 4 tokens; then 8 + </s> + 3 leave too little room
    assert "forgotten" not in said[0]
    assert said[1].startswith("(the context is full: of 12 tokens of text, the first 6 are forgotten)\n")
    # 9 tokens and 4 new ones: the last has no position
    said = talk(path, ["the s1 v1 a", "", ""], "--max-tokens", "4", monkeypatch=monkeypatch, capsys=capsys)
    assert ["forgotten" in answer for answer in said[:3]] == [False, False, True]


def test_a_stop_string_is_no_part_of_the_text_so_far(path, lm, monkeypatch, capsys):
    words = lm.generate("the s1", max_tokens=6, greedy=True).split()
    stop = next(word for word in words if word != words[0])
    options = ["--greedy", "--max-tokens", "6", "--stop", stop]
    said = talk(path, ["the s1", ""], *options, monkeypatch=monkeypatch, capsys=capsys)
    assert said[0].split() == words[: words.index(stop)]
    assert said[1] == "\n", "it comes to the same word again"


def test_line_ends_before_a_stop_string_stay_in_the_text_so_far(path, lm, monkeypatch, capsys):
    contexts = []

    def follow(self, prompts):
        contexts.extend(prompts)
        yield Text(0, finish="stop"), " the s1\na o2"

    monkeypatch.setattr(TextWriter, "follow", follow)
    talk(path, ["the", ""], "--stop", "and", "--max-tokens", "2", monkeypatch=monkeypatch, capsys=capsys)
    assert contexts[1] == [*contexts[0], *lm.tokenize("the s1"), Vocabulary.eos, *lm.tokenize("a o2")]


def test_an_answer_within_a_word_stays_within_it(tmp_path, monkeypatch, capsys):
    """SentencePiece would begin a word at an answer that was tokenised alone."""
    model = train_sentencepiece(["help the health of others there"] * 3, 25)
    (tmp_path / "sentencepiece.model").write_bytes(model)
    lm = smlp.load_pretrained(write_checkpoint(tmp_path, pieces_of(model), max_tokens=40)[0])
    loop, answers = prompt_loop.PromptLoop(lm.writer(3, stop=["e"])), iter(["th", " of h", "\nth", "", "th"])
    monkeypatch.setattr(TextWriter, "follow", lambda *arguments: iter([(Text(0, finish="stop"), next(answers))]))
    for line in ("a hel", "", "", "of"):
        loop._answer(line)
    assert loop._tokens[0] == lm.start_token
    assert loop._tokens[1:] == lm.tokenizer.encode_lines("a helth of h\nth\nof")
    before = loop._tokens
    loop._answer("h\u00e9")  # what is unknown has no text to be read again
    assert loop._tokens[len(before) :].count(Vocabulary.unk) == 1


def test_a_line_that_is_no_utf_8_is_refused_alone(path, monkeypatch, capsys):
    typed = b"/set\nthe \xff s1\n/d\xffance\n/reset\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8", errors="strict"))
    assert main(["generate", "--path", path, "--interactive"]) == 0
    said = capsys.readouterr().out.split("> ")[1:]
    assert "temperature" in said[0] and "U+DCFF, at character 4" in said[1]
    assert "no command /d\\udcffance" in said[2] and "forgotten" in said[3]


def test_draws_differ_from_answer_to_answer(path, monkeypatch, capsys):
    lines = ["the", "/reset", "the"]
    said = talk(path, lines, "--temperature", "3", "--max-tokens", "8", monkeypatch=monkeypatch, capsys=capsys)
    assert said[0] == said[2], "after a reset it begins anew"
    said = talk(path, ["the"] * 3, "--temperature", "3", "--max-tokens", "2", monkeypatch=monkeypatch, capsys=capsys)
    assert len(set(said[:3])) > 1


def test_ctrl_c_stops_the_answer_only(path, lm, monkeypatch, capsys):
    """Interrupted at the third token of the first answer, and once more while waiting for a line."""
    loop = prompt_loop.PromptLoop(lm.writer(6, greedy=True))
    calls = []
    features = lm.decoder.features

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return features(*arguments)

    monkeypatch.setattr(lm.decoder, "features", interrupted)
    typed = iter(["the s1", KeyboardInterrupt, "", EOFError])

    def ask(sign):
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", ask)
    assert loop.run() == 0
    first, gap, second, end = capsys.readouterr().out.split("\n")[:4]
    whole = next(lm.continuations(["the s1"], 8, greedy=True))[0]
    assert first == lm.tokenizer.decode(whole.tokens[:2]) + " (stopped)"
    assert gap == "" and end == ""
    assert second.split() == lm.tokenizer.decode(whole.tokens[2:]).split(), "it goes on where it was stopped"


def test_a_line_that_cannot_be_continued_does_not_end_the_loop(monkeypatch, capsys, tmp_path):
    from tiny_decoders import make

    lm = smlp.load_pretrained(write_checkpoint(tmp_path, WORDS)[0])
    partial = make("partial", vocab_size=14)
    lm.decoder = partial
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nthe s1 v1 a\n"))
    assert prompt_loop.PromptLoop(lm.writer(2)).run() == 0
    first, second, _ = capsys.readouterr().out.removeprefix("> ").split("> ")
    assert first.startswith("(the prompt has 2 tokens") and "at least 4" in first
    assert not second.startswith("(")


@pytest.mark.parametrize("options", [["--beam", "2"], ["--output", "x"], ["--num-return", "2"], ["--batch-size", "2"]])
def test_the_loop_writes_one_text_at_a_time(path, options, capsys):
    assert main(["generate", "--path", path, "--interactive", *options]) == 1
    assert f"leave out {options[0]}" in capsys.readouterr().err


def test_experts_take_every_token_whatever_the_model_was_trained_with(tmp_path, prompts, capsys):
    few = {"eval_capacity_factor": 0.5, "num_heads": 2}
    path = str(write_checkpoint(tmp_path / "few", WORDS, arch="switch_lm_tiny", **few)[0])
    command = ["generate", "--path", path, "--greedy", "--max-tokens", "5", "--output", "-"]
    assert main([*command, "--file", prompts]) == 0
    together = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for row in together:
        assert main([*command, "--prompt", row["prompt"]]) == 0
        alone = json.loads(capsys.readouterr().out)
        assert alone["tokens"] == row["tokens"]
        assert alone["token_log_probs"] == pytest.approx(row["token_log_probs"], abs=1e-4)
