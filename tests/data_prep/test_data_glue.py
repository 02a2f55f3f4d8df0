"""``smlp data glue``: the official files of every task, one's own, what fairseq reads of it, and bad input."""

import argparse
import json
import os

import pytest
from squad_data import write_tokenizer

from data_prep.finetuning.glue_tasks import TASKS, SplitFile, read_rows
from smlp.cli.main import main
from smlp.text.binarized import read_fairseq_tokens
from smlp.text.tokenizer import load_tokenizer
from smlp.text.tokenizer_files import find_tokenizer

PARSES = ["( a )", "( b )", "(ROOT a)", "(ROOT b)"]
STS_B = ["index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2"]
MNLI = [
    *("index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse"),
    *("sentence1_parse", "sentence2_parse", "sentence1", "sentence2"),
]
# The files as GLUE's archives have them: columns by name, then rows; CoLA's train and dev have no header.
OFFICIAL = {
    "CoLA": {
        "train.tsv": [["gj04", "1", "", "we like it ."], ["gj04", "0", "*", "it like we ."]],
        "dev.tsv": [["gj04", "1", "", 'they "like it .']],
        "test.tsv": [["index", "sentence"], ["0", "it is ."]],
    },
    "SST-2": {
        "train.tsv": [["sentence", "label"], ["we like it ", "1"], ["they hate it ", "0"]],
        "dev.tsv": [["sentence", "label"], ["it is .", "0"]],
        "test.tsv": [["index", "sentence"], ["0", "we like ."]],
    },
    "MRPC": {
        "train.tsv": [
            ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
            *(["1", "7", "8", "we like it", "it we like"], ["0", "5", "6", "it is", "they hate it"]),
        ],
        "dev.tsv": [
            ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
            ["1", "17", "18", "we like", "like we"],
        ],
        "test.tsv": [
            ["index", "#1 ID", "#2 ID", "#1 String", "#2 String"],
            ["0", "27", "28", "it is .", "is it ."],
        ],
    },
    "STS-B": {
        "train.tsv": [
            [*STS_B, "score"],
            *(
                ["0", "main", "MSRvid", "2012", "1", "none", "none", "we like it", "it we like", "5.000"],
                ["1", "main", "MSRvid", "2012", "2", "none", "none", "we hate it", "it is", "0.250"],
            ),
        ],
        "dev.tsv": [
            [*STS_B, "score"],
            ["0", "main", "MSRvid", "2012", "1", "none", "none", "we", "they", "1.6"],
        ],
        "test.tsv": [
            STS_B,
            ["0", "main", "MSRvid", "2012", "1", "none", "none", "it", "is"],
        ],
    },
    "QQP": {
        "train.tsv": [
            ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
            *(["1", "1", "2", "we like it ?", "it we like ?", "0"], ["2", "3", "4", "broken"]),
            *(["3", "5", "6", "is it ?", "", "0"], ["4", "7", "8", "they hate it ?", "is it ?", "1"]),
        ],
        "dev.tsv": [
            ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
            ["5", "9", "10", "is it ?", "it is ?", "1"],
        ],
        "test.tsv": [["id", "question1", "question2"], ["0", "is it ?", ""], ["1", "we ?", "they ?"]],
    },
    "MNLI": {
        "train.tsv": [
            [*MNLI, "label1", "gold_label"],
            *(
                ["0", "1", "1n", "fiction", *PARSES, "we like it", "it is", "neutral", "neutral"],
                ["1", "2", "2e", "fiction", *PARSES, "we hate it", "we hate", "entailment", "entailment"],
                ["2", "3", "3c", "fiction", *PARSES, "we hate it", "we like it", "contradiction", "contradiction"],
            ),
        ],
        **{
            f"dev_{name}.tsv": [
                [*MNLI, *(f"label{number}" for number in range(1, 6)), "gold_label"],
                ["0", "1", "1e", "slate", *PARSES, text, "it is", *["neutral"] * 5, "entailment"],
            ]
            for name, text in (("matched", "we like"), ("mismatched", "they like"))
        },
        **{
            f"test_{name}.tsv": [
                MNLI,
                ["0", "1", "1", "slate", *PARSES, text, "it is"],
            ]
            for name, text in (("matched", "we hate"), ("mismatched", "they hate"))
        },
    },
    "QNLI": {
        "train.tsv": [
            ["index", "question", "sentence", "label"],
            *(["0", "is it ?", "it is .", "entailment"], ["1", "we ?", "they like .", "not_entailment"]),
        ],
        "dev.tsv": [["index", "question", "sentence", "label"], ["0", "is it ?", "we", "not_entailment"]],
        "test.tsv": [["index", "question", "sentence"], ["0", "is it ?", "they"]],
    },
    "RTE": {
        "train.tsv": [
            ["index", "sentence1", "sentence2", "label"],
            *(["0", "we like it .", "we like .", "entailment"], ["1", "it is .", "it ?", "not_entailment"]),
        ],
        "dev.tsv": [["index", "sentence1", "sentence2", "label"], ["0", "we", "it", "entailment"]],
        "test.tsv": [["index", "sentence1", "sentence2"], ["0", "we", "they"]],
    },
    "WNLI": {
        "train.tsv": [
            ["index", "sentence1", "sentence2", "label"],
            *(["0", "we like it .", "we like .", "1"], ["1", "it is .", "it ?", "0"]),
        ],
        "dev.tsv": [["index", "sentence1", "sentence2", "label"], ["0", "we", "it", "1"]],
        "test.tsv": [["index", "sentence1", "sentence2"], ["0", "we", "they"]],
    },
}
WORDS = ["we", "they", "it", "like", "hate", "is", ".", "?", '"like']
CLASSES = {  # RoBERTa's numbers of MNLI, the order of the Hugging Face data sets for the others
    "MNLI": ("contradiction", "neutral", "entailment"),
    **{name: ("entailment", "not_entailment") for name in ("QNLI", "RTE")},
    **{name: ("0", "1") for name in ("CoLA", "SST-2", "MRPC", "QQP", "WNLI")},
}
SENTENCES = {"CoLA": (3,), "SST-2": (0,), "MRPC": (3, 4), "STS-B": (7, 8), "QQP": (3, 4), "MNLI": (8, 9)}


@pytest.fixture
def tokenizer(tmp_path):
    """One that splits at spaces."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "dict.txt").write_text("".join(f"{word} 1\n" for word in WORDS))
    return tmp_path / "tokenizer"


def write_task(folder, name, end="\n"):
    folder.mkdir(exist_ok=True)
    for file, rows in OFFICIAL[name].items():
        (folder / file).write_text("".join("\t".join(row) + end for row in rows), encoding="utf-8", newline="")
    return folder


def glue(*arguments):
    return main(["data", "glue", *map(str, arguments), "--workers", "1", "--quiet"])


def fairseq_task(out, classes, regression=False):
    """Fairseq's own task on the data, with the layout that the command recommends."""
    from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask

    config = SentencePredictionConfig(
        data=str(out), num_classes=classes, init_token=0, regression_target=regression, seed=1, no_shuffle=True
    )
    return SentencePredictionTask.setup_task(config)


@pytest.mark.parametrize("name", OFFICIAL)
def test_fairseq_reads_the_official_files_of_every_task(name, tokenizer, tmp_path, capsys):
    out, task = tmp_path / "out", TASKS[name]
    assert glue("--task", name, "--in", write_task(tmp_path / name, name), "--tokenizer", tokenizer, "--out", out) == 0
    said = capsys.readouterr().out
    encoder = load_tokenizer(tokenizer)
    read = fairseq_task(out, len(task.labels) or 1, regression=not task.labels)
    assert read.dictionary.symbols[:-1] == encoder.vocabulary.symbols and read.dictionary.symbols[-1] == "<mask>"
    splits = {"train": "train.tsv", "valid": "dev.tsv", "test": "test.tsv"}
    if name == "MNLI":
        splits = {
            "train": "train.tsv",
            **{f"valid{end}": f"dev_{kind}.tsv" for end, kind in (("", "matched"), ("1", "mismatched"))},
            **{f"test{end}": f"test_{kind}.tsv" for end, kind in (("", "matched"), ("1", "mismatched"))},
        }
    for split, file in splits.items():
        rows = OFFICIAL[name][file]
        rows = rows if name == "CoLA" and split != "test" else rows[1:]
        if name == "QQP" and split == "train":
            rows = [rows[0], rows[3]]
        columns = SENTENCES.get(name, (1, 2))
        if split.startswith("test") and name in ("CoLA", "SST-2", "QQP"):
            columns = (1,) if len(columns) == 1 else (1, 2)
        read.load_dataset(split)
        samples = [read.datasets[split][at] for at in range(len(read.datasets[split]))]
        expected = [[0, *(token for column in columns for token in [*encoder.encode(row[column]), 2])] for row in rows]
        assert [sample["net_input.src_tokens"].tolist() for sample in samples] == expected
        if split.startswith("test"):
            assert all("target" not in sample for sample in samples)
        elif name == "STS-B":
            assert [sample["target"] for sample in samples] == [[float(row[-1])] for row in rows]
        else:
            label = {"CoLA": 1, "MRPC": 0}.get(name, -1)
            assert [int(sample["target"]) for sample in samples] == [CLASSES[name].index(row[label]) for row in rows]
    if name == "QQP":
        assert "rows of train left out: 4 columns instead of 6" in said and "an empty sentence" in said
    assert f"--valid-subset {'valid,valid1' if name == 'MNLI' else 'valid'} " in said


def test_labels_keep_their_numbers_whatever_is_frequent(tokenizer, tmp_path):
    """Fairseq's own script numbers them by frequency in train."""
    for name, rows in (("one", ["1", "1", "1", "0"]), ("two", ["0", "0", "1"])):
        for file in ("train.tsv", "dev.tsv"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / file).write_text("sentence\tlabel\n" + "".join(f"we like\t{row}\n" for row in rows))
        out = tmp_path / f"out-{name}"
        assert glue("--task", "SST-2", "--in", tmp_path / name, "--tokenizer", tokenizer, "--out", out) == 0
        assert [line.split()[0] for line in (out / "label" / "dict.txt").read_text().splitlines()] == ["0", "1"]
        expected = [token for row in rows for token in (4 + int(row), 2)]
        assert read_fairseq_tokens(out / "label" / "train").tokens.tolist() == expected


def test_files_of_the_msr_corpus_are_split_by_glues_list(tokenizer, tmp_path, capsys):
    """With their byte-order mark and line ends."""
    folder = tmp_path / "MRPC"
    folder.mkdir()
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    for part, rows in (
        ("train", ["1\t1\t2\twe\tthey", "0\t3\t4\tit\tis", "1\t5\t6\tlike\thate"]),
        ("test", ["0\t7\t8\t.\t?"]),
    ):
        content = "\ufeff" + "".join(f"{line}\r\n" for line in (header, *rows))
        (folder / f"msr_paraphrase_{part}.txt").write_text(content, encoding="utf-8", newline="")
    arguments = ("--task", "MRPC", "--in", folder, "--tokenizer", tokenizer, "--out", tmp_path / "out")
    assert glue(*arguments) == 1
    assert "no dev_ids.tsv" in capsys.readouterr().err
    (folder / "dev_ids.tsv").write_text("3\t4\n")
    assert glue(*arguments) == 0
    tokens = {
        split: read_fairseq_tokens(tmp_path / "out" / "input0" / split).tokens.tolist()
        for split in ("train", "valid", "test")
    }
    we, it, like, stop = (4 + WORDS.index(word) for word in ("we", "it", "like", "."))
    assert tokens == {"train": [we, 2, like, 2], "valid": [it, 2], "test": [stop, 2]}
    assert read_fairseq_tokens(tmp_path / "out" / "label" / "test").tokens.tolist() == [4, 2]


def own(folder, header, rows):
    folder.mkdir(exist_ok=True)
    for file in ("train.tsv", "dev.tsv"):
        (folder / file).write_text("".join(f"{line}\n" for line in (header, *rows)))
    return folder


def test_own_files_name_their_columns(tokenizer, tmp_path, capsys):
    folder = own(tmp_path / "own", "label\tb\ta", ["yes\twe\tthey", "no\tit\tis", "maybe so\tlike\thate"])
    columns = ("--columns", "a,b", "--label", "label", "--in", folder, "--tokenizer", tokenizer)
    assert glue(*columns, "--out", tmp_path / "out") == 0
    read = fairseq_task(tmp_path / "out", 3)
    read.load_dataset("train")
    assert [int(read.datasets["train"][at]["target"]) for at in range(3)] == [2, 1, 0]  # of maybe so, no, yes
    assert glue(*columns, "--out", tmp_path / "ordered", "--labels", "yes,no,maybe so,never") == 0
    lines = (tmp_path / "ordered" / "label" / "dict.txt").read_text().splitlines()
    assert lines == ["yes 1", "no 1", "maybe so 1", "never 0"]
    own(folder, "label\tb\ta", [f"{number}\twe\tthey" for number in range(10, 60)])
    capsys.readouterr()
    assert glue(*columns, "--out", tmp_path / "many") == 0
    printed = capsys.readouterr().out
    assert "29: 1, ..." in printed and "30: 1" not in printed
    own(folder, "label\tb\ta", ["\U0001f468\u200d\U0001f469\twe\tthey", "a\u00a0b\tit\tis"])
    assert glue(*columns, "--out", tmp_path / "joined") == 0
    capsys.readouterr()
    own(folder, "label\tb\ta", ["yes\twe\tthey", "no\rno\tit\tis"])
    assert glue(*columns, "--out", tmp_path / "label") == 1
    assert "line 3: 'no\\rno' cannot be a label" in capsys.readouterr().err
    own(folder, "label\tb\ta", ["-7.5\twe\tthey", "1e3\tit\tis"])
    assert glue(*columns, "--regression", "--out", tmp_path / "numbers") == 0
    assert (tmp_path / "numbers" / "label" / "valid.label").read_text() == "-7.5\n1e3\n"


def test_the_same_command_again_and_other_settings(tokenizer, tmp_path, capsys):
    out, folder = tmp_path / "out", write_task(tmp_path / "QNLI", "QNLI")
    arguments = ("--task", "QNLI", "--in", folder, "--tokenizer", tokenizer, "--out", out)
    assert glue(*arguments) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    manifest = json.loads((out / "manifest.json").read_text())
    assert {row["name"] for row in manifest["outputs"]} == {
        str(path.relative_to(out)) for path in before if ".state" not in path.parts and path.name != "manifest.json"
    }
    assert glue(*arguments) == 0
    assert {path: path.read_bytes() for path in before} == before
    (folder / "dev.tsv").write_text("index\tquestion\tsentence\tlabel\n0\twe\tit\tentailment\n")
    assert glue(*arguments) == 0
    assert read_fairseq_tokens(out / "label" / "valid").tokens.tolist() == [4, 2]
    one = own(tmp_path / "one", "a\tlabel", ["we\t0", "it\t1"])
    other = ("--columns", "a", "--label", "label", "--in", one, "--tokenizer", tokenizer, "--out", out)
    assert glue(*other) == 1 and "with other settings" in capsys.readouterr().err
    assert glue(*other, "--restart") == 0
    assert not (out / "input1").exists()  # fairseq would read pairs
    (one / "dev.tsv").write_text("a\tlabel\n\t1\n")
    assert glue(*other) == 1
    own(tmp_path / "one", "a\tlabel", ["we\t0", "it\t1"])
    assert glue(*other, "--labels", "1,0", "--restart") == 0


BAD = {
    "two columns": ("sentence\tsentence\tlabel\na\tb\t1\n", "{path} has 2 columns 'sentence'"),
    "columns": ("sentence\tclass\nwe\t1\n", "{path} has no column 'label': its columns are 'sentence', 'class'"),
    "many columns": (
        "sentence\tclass\r" + "we\t1\r" * 9000,
        "{path} has no column 'label': its columns are 'sentence', ",
    ),
    "fields": ("sentence\tlabel\nwe\t1\nwe\n", "{path}, line 3: 1 columns instead of 2"),
    "label": ("sentence\tlabel\nwe\t1\nit\t2\n", "{path}, line 3: the label is '2', not one of 0, 1"),
    "empty": ("sentence\tlabel\n \t1\n", "{path}, line 2: an empty sentence"),
    "invisible": ("sentence\tlabel\nwe\t1\n\u200b\t1\n", "{path}, line 3: an empty sentence"),
    "no row": ("sentence\tlabel\n", "{path} has no row for train"),
    "nothing": ("", "text file {path} is empty: 0 bytes, no word"),
    "not UTF-8": (
        b"sentence\tlabel\nwe \xe9\t1\n",
        "text file {path} is not UTF-8: byte 0xe9 at byte offset 18, line 2",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_one_sentence(case, tokenizer, tmp_path, capsys):
    content, message = BAD[case]
    folder = own(tmp_path / "in", "sentence\tlabel", ["we\t1", "they\t0"])
    (folder / "train.tsv").write_bytes(content.encode() if isinstance(content, str) else content)
    assert glue("--task", "SST-2", "--in", folder, "--tokenizer", tokenizer, "--out", tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert message.format(path=folder / "train.tsv") in said and len(said) < 600
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_pipe_is_no_file_to_read(tokenizer, tmp_path, capsys):
    os.mkfifo(tmp_path / "a.tsv")
    words = ("--task", "SST-2", "--train", tmp_path / "a.tsv", "--tokenizer", tokenizer, "--out", tmp_path / "out")
    assert glue(*words) == 1
    assert f"--train: {tmp_path / 'a.tsv'} is not a regular file but a named pipe" in capsys.readouterr().err


def test_a_sentence_that_the_tokenizer_drops_is_refused(tmp_path, capsys):
    folder, tokenizer = own(tmp_path / "in", "sentence\tlabel", ["we\t1", "\ufffd\t0"]), tmp_path / "pieces"
    write_tokenizer(tokenizer, "unigram")
    assert glue("--task", "SST-2", "--in", folder, "--tokenizer", tokenizer, "--out", tmp_path / "out") == 1
    assert "the sentence '\ufffd' has no token" in capsys.readouterr().err


def test_the_tokenizer_lies_with_the_sentences(tmp_path):
    """There, a fine-tuned checkpoint finds it."""
    folder, tokenizer = own(tmp_path / "in", "sentence\tlabel", ["we\t1", "it\t0"]), tmp_path / "pieces"
    write_tokenizer(tokenizer, "unigram")
    assert glue("--task", "SST-2", "--in", folder, "--tokenizer", tokenizer, "--out", tmp_path / "out") == 0
    found = find_tokenizer([tmp_path / "out" / "input0"])
    assert found.read_bytes() == (tokenizer / "sentencepiece.model").read_bytes()


@pytest.mark.parametrize("score", ["5.1", "nan", "-1", "high", "", "0_1", "４"])
def test_scores_of_sts_b_are_from_0_to_5(score, tmp_path, capsys):
    header, *rows = OFFICIAL["STS-B"]["train.tsv"]
    rows[1] = [*rows[1][:-1], score]
    (tmp_path / "train.tsv").write_text("\n".join("\t".join(row) for row in (header, *rows)))
    with pytest.raises(ValueError, match=rf"train.tsv, line 3: the score is '{score}', not a number from 0 to 5"):
        read_rows(SplitFile(tmp_path / "train.tsv"), TASKS["STS-B"], "train")


REFUSED = {
    "give --task, or --columns": ["--in", "{in}"],
    "--label is only for --columns": ["--task", "SST-2", "--label", "label", "--in", "{in}"],
    "--columns 'a,b,c'": ["--columns", "a,b,c", "--label", "label", "--in", "{in}"],
    "--columns needs --label": ["--columns", "a", "--in", "{in}"],
    "--labels 'x'": ["--columns", "sentence", "--label", "label", "--labels", "x", "--in", "{in}"],
    "give one of the two": ["--columns", "a", "--label", "b", "--labels", "x,y", "--regression", "--in", "{in}"],
    "not both": ["--task", "SST-2", "--in", "{in}", "--train", "{in}/train.tsv"],
    "is not a folder": ["--task", "SST-2", "--in", "{in}/gone"],
    "has no dev_matched.tsv and no dev_mismatched.tsv": ["--task", "MNLI", "--in", "{in}"],
    "--valid: there is no file": ["--task", "SST-2", "--train", "{in}/train.tsv", "--valid", "{in}/gone.tsv"],
    "--train is missing": ["--task", "SST-2", "--valid", "{in}/dev.tsv"],
    "all rows have the label '1'": ["--columns", "sentence", "--label", "same", "--in", "{in}"],
    "--labels: '<s>' cannot be a label": ["--columns", "a", "--label", "b", "--labels", "<s>,x", "--in", "{in}"],
    "--labels: 'madeupword0000' cannot be a label": [
        *("--columns", "a", "--label", "b", "--labels", "madeupword0000,x", "--in", "{in}")
    ],
    "'<unk>' cannot be a label": ["--columns", "sentence", "--label", "special", "--in", "{in}"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_options_that_do_not_fit_are_one_sentence(message, tokenizer, tmp_path, capsys):
    folder = own(tmp_path / "in", "sentence\tlabel\tsame\tspecial", ["we\t1\t1\t<unk>", "they\t0\t1\tx"])
    arguments = [word.format(**{"in": folder}) for word in REFUSED[message]]
    assert glue(*arguments, "--tokenizer", tokenizer, "--out", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_tasks_are_those_of_the_option():
    from data_prep.finetuning.glue import add_options

    parser = argparse.ArgumentParser()
    add_options(parser)
    assert set(OFFICIAL) == set(next(a for a in parser._actions if a.dest == "task").choices)
