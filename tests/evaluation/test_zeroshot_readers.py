"""Readers of the six zero-shot tasks, on small files of the official shapes, and on files that are wrong."""

import gzip
import json

import pytest

from smlp.errors import UserError
from smlp.evaluation.zeroshot import files
from smlp.evaluation.zeroshot.readers import READERS

COPA = {
    "premise": "It rained.",
    "choice1": "I got wet.",
    "choice2": "I flew.",
    "question": "effect",
    "label": 0,
    "idx": 3,
}
PIQA = {"goal": "Boil water", "sol1": "Heat it.", "sol2": " Cool it. "}
WINOGRANDE = {
    "qID": "a-1",
    "sentence": "Ann thanked Bea as _ helped.",
    "option1": "Ann",
    "option2": "Bea",
    "answer": "2",
}
HELLASWAG = {
    "ind": 24, "activity_label": "Roofing", "ctx_a": "A man sits.", "ctx_b": "he", "ctx": "A man sits. he",
    "endings": ["sings.", "works.", ", then falls.", "eats."], "label": 3,
}  # fmt: skip
PASSAGE = "Al Gore met Bo.\n@highlight\nGore met Bo"
RECORD = {
    "source": "x",
    "passage": {
        "text": PASSAGE,
        # both ends belong to the span
        "entities": [{"start": start, "end": end} for start, end in ((0, 6), (12, 13), (27, 30), (36, 37))],
    },
    "qas": [
        {"query": "@placeholder won.", "idx": 7, "answers": [
            {"start": 0, "end": 6, "text": "Al Gore"}, {"start": 27, "end": 30, "text": "Gore"},
        ]},
        {"query": "It was @placeholder.", "idx": 8, "answers": [{"start": 36, "end": 37, "text": "Bo"}]},
    ],
}  # fmt: skip
CLOZE_HEADER = (
    "InputStoryid,InputSentence1,InputSentence2,InputSentence3,InputSentence4,"
    "RandomFifthSentenceQuiz1,RandomFifthSentenceQuiz2,AnswerRightEnding"
)
CLOZE_FILE = "cloze_test_test__spring2016 - cloze_test_ALL_test"


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read(name, data_dir, split=None):
    return READERS[name].read(data_dir, split)


def test_copa(tmp_path):
    write(tmp_path / "COPA" / "val.jsonl", COPA, {**COPA, "question": "cause", "label": "1"})
    first, second = read("copa", tmp_path)
    assert (first.id, first.premise, first.choices) == ("3", "It rained.", ("I got wet.", "I flew."))
    assert (first.question, first.gold, second.question, second.gold) == ("effect", 0, "cause", 1)


@pytest.mark.parametrize("stem", ["valid", "dev"])
def test_piqa_has_its_answers_in_a_file_beside(tmp_path, stem):
    write(tmp_path / "piqa" / f"{stem}.jsonl", PIQA, PIQA)
    (tmp_path / "piqa" / f"{stem}-labels.lst").write_text("0\n1\n\n")
    first, second = read("piqa", tmp_path)
    assert (first.goal, first.solutions, first.gold, second.gold) == ("Boil water", ("Heat it.", " Cool it. "), 0, 1)


def test_winogrande(tmp_path):
    path = write(tmp_path / "winogrande_1.1" / "dev.jsonl", WINOGRANDE, {**WINOGRANDE, "answer": 1})
    first, second = read("winogrande", tmp_path)
    assert (first.sentence, first.options, first.gold, second.gold) == (WINOGRANDE["sentence"], ("Ann", "Bea"), 1, 0)
    labels = path.with_name("dev-labels.lst")
    labels.write_text("2\n1\n")
    assert [item.gold for item in read("winogrande", tmp_path)] == [1, 0]
    labels.write_text("2\n2\n")
    with pytest.raises(UserError, match=r"line 2: 'answer' is 1, but .*dev-labels.lst has 2"):
        read("winogrande", tmp_path)


def test_hellaswag_with_labels_of_either_kind_and_finished_scenes(tmp_path):
    write(tmp_path / "hellaswag_val.jsonl", HELLASWAG, {**HELLASWAG, "label": "0", "ctx_b": ""})
    first, second = read("hellaswag", tmp_path)
    assert (first.activity, first.ctx_a, first.ctx_b, first.gold) == ("Roofing", "A man sits.", "he", 3)
    assert first.endings[2] == ", then falls." and (second.ctx_b, second.gold) == ("", 0)


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_storycloze_as_csv_and_as_tsv(tmp_path, kind):
    fields = ["id-1", 'He said "no", twice.', "Two.", "Three.", "Four.", "Good end, yes.", "Bad end.", "2"]
    if kind == "csv":
        row = ",".join('"' + field.replace('"', '""') + '"' for field in fields)
        content = f"{CLOZE_HEADER}\r\n{row}\r\n"
    else:
        content = CLOZE_HEADER.replace(",", "\t") + "\n" + "\t".join(fields) + "\n"
    (tmp_path / "storycloze").mkdir()
    (tmp_path / "storycloze" / f"{CLOZE_FILE}.{kind}").write_text("\ufeff" + content, encoding="utf-8")
    (item,) = read("storycloze", tmp_path)
    assert item.sentences == ('He said "no", twice.', "Two.", "Three.", "Four.") and item.id == "id-1"
    assert item.endings == ("Good end, yes.", "Bad end.") and item.gold == 1


def test_storycloze_with_the_names_of_hugging_face(tmp_path):
    header = (
        "story_id,input_sentence_1,input_sentence_2,input_sentence_3,input_sentence_4,sentence_quiz1,sentence_quiz2"
    )
    (tmp_path / f"{CLOZE_FILE}.csv").write_text(f"{header},answer_right_ending\nx,a,b,c,d,e,f,1\n")
    (item,) = read("storycloze", tmp_path)
    assert item.sentences == ("a", "b", "c", "d") and item.gold == 0


def test_record_has_several_queries_mentions_and_right_answers(tmp_path):
    write(tmp_path / "ReCoRD" / "val.jsonl", RECORD)
    first, second = read("record", tmp_path)
    assert first.entities == second.entities == ("Al Gore", "Bo", "Gore"), "each text once"
    assert (first.answers, second.answers) == (("Al Gore", "Gore"), ("Bo",))
    assert (first.id, second.id, first.query) == ("7", "8", "@placeholder won.") and first.passage == PASSAGE


def test_record_as_hugging_face_has_it(tmp_path):
    flat = {
        "passage": PASSAGE,
        "query": "@placeholder won.",
        "entities": ["Bo", "Al Gore", "Bo"],
        "answers": ["Al Gore"],
    }
    write(tmp_path / "val.jsonl", flat)
    (item,) = read("record", tmp_path)
    assert item.entities == ("Bo", "Al Gore") and item.answers == ("Al Gore",)


def changed(record, **more):
    return {name: value for name, value in {**record, **more}.items() if value != "absent"}


@pytest.mark.parametrize(
    ("task", "file", "record", "message"),
    [
        ("copa", "val.jsonl", changed(COPA, label="absent"), "line 1: 'label' is missing: a split without answers"),
        ("copa", "val.jsonl", changed(COPA, label=2), "'label' must be one of 0, 1, found 2"),
        ("copa", "val.jsonl", changed(COPA, label="0_1"), "'label' must be one of 0, 1, found '0_1'"),
        ("copa", "val.jsonl", changed(COPA, label=True), "'label' must be one of 0, 1, found True"),
        ("copa", "val.jsonl", changed(COPA, question="why"), "must be cause or effect, found 'why'"),
        ("copa", "val.jsonl", changed(COPA, premise="absent"), "'premise' is missing"),
        ("copa", "val.jsonl", changed(COPA, choice2=5), "'choice2' must be text, found 5"),
        ("copa", "val.jsonl", [1], "expected a JSON object, found list"),
        ("piqa", "valid.jsonl", PIQA, "valid-labels.lst is missing: it has the answers"),
        ("winogrande", "dev.jsonl", changed(WINOGRANDE, sentence="No blank."), "must have one blank .*found 0"),
        ("winogrande", "dev.jsonl", changed(WINOGRANDE, sentence="_ and _"), "found 2"),
        ("winogrande", "dev.jsonl", changed(WINOGRANDE, answer=""), "'answer' is missing: a split without answers"),
        ("winogrande", "dev.jsonl", changed(WINOGRANDE, option1=" "), "'option1' is empty"),
        ("winogrande", "dev.jsonl", changed(WINOGRANDE, option2=""), "'option2' is empty"),
        (
            "record",
            "val.jsonl",
            {"passage": "Al met Bo.", "query": "@placeholder", "entities": ["Al", ""], "answers": ["Al"]},
            "an entity is empty",
        ),
        ("hellaswag", "hellaswag_val.jsonl", changed(HELLASWAG, endings=["a"]), "must be a list of 4 texts"),
        ("hellaswag", "hellaswag_val.jsonl", changed(HELLASWAG, label="4"), "one of 0, 1, 2, 3, found '4'"),
        ("copa", "val.jsonl", changed(COPA, premise="a \udc41 b"), r"line 1: the text .*lone surrogate, U\+DC41"),
        (
            "hellaswag",
            "hellaswag_val.jsonl",
            changed(HELLASWAG, ctx_b="absent", ctx="a b"),
            "'ctx_b' is missing, and 'ctx' goes on after 'ctx_a'",
        ),
        ("record", "val.jsonl", changed(RECORD, qas="absent", questions=[]), "line 1: 'qas' is missing"),
        ("record", "val.jsonl", changed(RECORD, qas=[]), "line 1: 'qas' has no query"),
        ("record", "val.jsonl", changed(RECORD, passage=3), "'passage' must be an object"),
        ("record", "val.jsonl", changed(RECORD, qas=[{"query": "none", "answers": []}]), "one @placeholder, found 0"),
        (
            "record",
            "val.jsonl",
            changed(RECORD, qas=[{"query": "@placeholder", "answers": []}]),
            "'answers' is missing",
        ),
        (
            "record",
            "val.jsonl",
            changed(RECORD, qas=[{"query": "@placeholder", "answers": [{"start": 0, "end": 99}]}]),
            "span 0 to 99 in a passage of 38 characters",
        ),
        (
            "record",
            "val.jsonl",
            changed(RECORD, qas=[{"query": "@placeholder", "answers": [{"start": 0, "end": 1}]}]),
            "the answer 'Al' is not among the 4 entities",
        ),
        (
            "record",
            "val.jsonl",
            changed(RECORD, qas=[{"query": "@placeholder", "answers": [{"start": False, "end": 1}]}]),
            "span False to 1 in a passage",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path, task, file, record, message):
    write(tmp_path / file, record)
    with pytest.raises(UserError, match=message) as error:
        read(task, tmp_path)
    assert file.partition(".")[0] in str(error.value) and "\n" not in str(error.value)


def test_odd_files_are_named_too(tmp_path):
    folder = tmp_path / "storycloze"
    folder.mkdir()
    row = 'id,"open quote,' + "word\n" * 40_000
    (folder / f"{CLOZE_FILE}.csv").write_text(f"{CLOZE_HEADER}\n{row}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"csv, line 2: not a table \(field larger .* is a quote left open"):
        read("storycloze", tmp_path)
    for text in ("9" * 5000, "[" * 100_000):
        (tmp_path / "val.jsonl").write_text(text + "\n", encoding="utf-8")
        with pytest.raises(UserError, match=r"val.jsonl, line 1: not JSON"):
            read("copa", tmp_path)


def test_gzip_files_are_read_where_the_plain_ones_are_missing(tmp_path, monkeypatch):
    def compress(path):
        (packed := path.with_name(path.name + ".gz")).write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
        return packed

    copa = compress(write(tmp_path / "copa" / "val.jsonl", COPA))
    assert [item.id for item in read("copa", tmp_path)] == ["3"]
    assert READERS["copa"].files(tmp_path) == [copa]  # over which nothing is written
    compress(write(tmp_path / "piqa" / "valid.jsonl", PIQA))
    with pytest.raises(UserError, match=r"/valid-labels.lst is missing: it has the answers to .*valid.jsonl.gz"):
        read("piqa", tmp_path)
    (labels := tmp_path / "piqa" / "valid-labels.lst").write_text("1\n")
    compress(labels)
    assert [item.gold for item in read("piqa", tmp_path)] == [1]

    whole = copa.read_bytes()
    for content in (b"any", b"", whole[:-9], whole[:20] + b"xxxx" + whole[24:]):
        copa.write_bytes(content)
        with pytest.raises(UserError, match=r"val.jsonl.gz (is damaged, or not a gzip file: .|has no records)"):
            read("copa", tmp_path)
    copa.write_bytes(gzip.compress(bytes(1001)))
    monkeypatch.setattr(files, "_MOST_BYTES", 1000)
    with pytest.raises(UserError, match=r"val.jsonl.gz holds more than 1,000 bytes: it is not a task's file"):
        read("copa", tmp_path)


def test_what_is_no_file_is_not_called_missing(tmp_path):
    (tmp_path / "val.jsonl").mkdir()
    with pytest.raises(UserError, match=r"val.jsonl is no regular file"):
        read("copa", tmp_path)


@pytest.mark.parametrize("end", [".zst", ".xz", ".bz2"])
def test_compressed_files_are_named_where_they_are_missing(tmp_path, end):
    (tmp_path / f"val.jsonl{end}").write_bytes(b"any")
    with pytest.raises(UserError, match=rf"copa/val.jsonl is missing; .*/val.jsonl{end} exists: decompress it"):
        read("copa", tmp_path)
    write(tmp_path / "valid.jsonl", PIQA)
    write(tmp_path / "dev.jsonl", WINOGRANDE)
    for task, labels in (("piqa", "valid-labels.lst"), ("winogrande", "dev-labels.lst")):
        (tmp_path / f"{labels}{end}").write_bytes(b"any")
        assert len(READERS[task].files(tmp_path)) == 1
        with pytest.raises(UserError, match=rf"{labels} is missing.*{labels}{end} exists: decompress it"):
            read(task, tmp_path)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(UserError, match=r"copa/val.jsonl is missing; it comes from .*SuperGLUE"):
        read("copa", tmp_path)
    with pytest.raises(UserError, match=r"valid.jsonl or .*dev.jsonl is missing"):
        read("piqa", tmp_path)
    with pytest.raises(UserError, match="no split 'test': choose from val, train"):
        read("copa", tmp_path, "test")
    with pytest.raises(UserError, match="is not a folder"):
        read("copa", tmp_path / "nowhere")
    (tmp_path / "val.jsonl").write_text('{"premise": \n')
    with pytest.raises(UserError, match=r"val.jsonl, line 1: not JSON"):
        read("copa", tmp_path)
    (tmp_path / "val.jsonl").write_bytes(b'{"premise": "\xff"}\n')
    with pytest.raises(UserError, match="is not UTF-8: byte 13"):
        read("copa", tmp_path)
    (tmp_path / "val.jsonl").write_bytes(b'\xef\xbb\xbf{"premise": "\xff"}\n')
    with pytest.raises(UserError, match="is not UTF-8: byte 16"):
        read("copa", tmp_path)
    (tmp_path / "val.jsonl").write_text("\n")
    with pytest.raises(UserError, match="has no records"):
        read("copa", tmp_path)
    write(tmp_path / "valid.jsonl", PIQA, PIQA)
    (tmp_path / "valid-labels.lst").write_text("0\n")
    with pytest.raises(UserError, match=r"valid-labels.lst has 1 labels, .*valid.jsonl has 2 records"):
        read("piqa", tmp_path)
    (tmp_path / "valid-labels.lst").write_text("0\n" + "1" * 5000)
    with pytest.raises(UserError, match=r"valid-labels.lst, line 2: 'label' must be one of 0, 1, found '1{39}$"):
        read("piqa", tmp_path)
    (tmp_path / "valid-labels.lst").write_text("0\n7\n")
    with pytest.raises(UserError, match=r"valid-labels.lst, line 2: 'label' must be one of 0, 1, found '7'"):
        read("piqa", tmp_path)
    (tmp_path / f"{CLOZE_FILE}.csv").write_text(CLOZE_HEADER + "\na,b\n")
    with pytest.raises(UserError, match="line 2: 'InputSentence2' or 'input_sentence_2' is missing"):
        read("storycloze", tmp_path)
    (tmp_path / f"{CLOZE_FILE}.csv").write_text(CLOZE_HEADER + "\na,b,c,d,e,f,g,1,9\n")
    with pytest.raises(UserError, match="line 2: 1 more columns than the header has"):
        read("storycloze", tmp_path)
