"""Wrong data and options of ``sentence_prediction`` end in one sentence."""

import json
import shutil

import pytest
from running import USER_DIR

from smlp.cli.main import main

pytestmark = pytest.mark.long

ROWS = ["label\ta\tb"] + [f"{'xyz'[at % 3]}\tthe a and\tand {'a ' * at}" for at in range(9)]
TRAIN = [
    *(
        "--user-dir",
        USER_DIR,
        "--task",
        "sentence_prediction",
        "--arch",
        "amlp_mlm_tiny",
        "--embed-dim",
        "16",
        "--ffn-dim",
        "32",
        "--num-dense-layers",
        "1",
    ),
    *("--batch-size", "4", "--optimizer", "adam", "--lr", "1e-3", "--max-update", "1", "--no-save"),
    *("--num-workers", "0", "--max-positions", "16", "--init-token", "0"),
]
NUMBERS = ["--criterion", "sentence_prediction", "--regression-target"]


#: what is done to the data, more options, and the message
def flip(path):
    """Change a byte to another label."""
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def change_number(data):
    """Write numbers to predict that are not those of the manifest."""
    (data / "label" / "valid.label").write_text("1\n" * 9)
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["outputs"].append({"name": "label/valid.label", "bytes": 18, "sha256": "0" * 64})
    (data / "manifest.json").write_text(json.dumps(manifest))


BAD = {
    "changed": (lambda own: flip(own / "label" / "train.bin"), [], "{data}/label/train.bin has changed: its SHA-256"),
    "changed number": (
        change_number,
        [*NUMBERS, "--num-classes", "1"],
        "{data}/label/valid.label has changed: its SHA-256",
    ),
    "gone": (shutil.rmtree, [], "there is no file {data}/input0/dict.txt: make the data with 'smlp data glue'"),
    "classes": (None, ["--num-classes", "-1"], "--num-classes is missing"),
    "few classes": (None, ["--num-classes", "2"], "--num-classes 2, but {data}/label/valid.bin has 3 classes"),
    "many classes": (None, ["--num-classes", "4"], "--num-classes 4, but {data}/label/dict.txt has 3 labels"),
    "no label": (lambda data: shutil.rmtree(data / "label"), [], "there is no file {data}/label/dict.txt"),
    "numbers": (None, NUMBERS, "there is no file {data}/label/valid.label (--regression-target"),
    "a word": (
        lambda data: (data / "label" / "valid.label").write_text("1\n1_0\n" + "2\n" * 7),
        [*NUMBERS, "--num-classes", "1"],
        "{data}/label/valid.label, line 2: 1 numbers are expected (--num-classes), found '1_0'",
    ),
    "no split": (
        lambda data: (data / "input0" / "train.idx").unlink(),
        [],
        "there is no file {data}/input0/train.idx",
    ),
    "no labels": (
        lambda data: (data / "label" / "train.idx").unlink(),
        [],
        "there is no file {data}/label/train.idx: make the data",
    ),
    "cut off": (
        lambda data: (data / "input1" / "train.bin").write_bytes(b"1234"),
        [],
        "{data}/input1/train.bin holds 4 bytes",
    ),
    "fewer rows": (
        lambda data: [
            shutil.copy(data / "label" / f"test.{end}", data / "label" / f"train.{end}") for end in ("bin", "idx")
        ],
        [],
        "differ in their numbers of rows: input0/train has 9, input1/train has 9, label/train has 3",
    ),
    "init token": (None, ["--init-token", "9999"], "--init-token 9999: the dictionary has the ids 0 to"),
    "separator": (None, ["--separator-token", "-1"], "--separator-token -1: the dictionary has the ids 0 to"),
    "too long": (None, ["--max-positions", "10"], "of sentences, --shorten-method truncate)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tiny_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentences")
    (folder / "rows.tsv").write_text("\n".join(ROWS))
    (folder / "few.tsv").write_text("\n".join(ROWS[:4]))
    arguments = [
        *("--columns", "a,b", "--label", "label", "--train", folder / "rows.tsv", "--valid", folder / "rows.tsv"),
        *("--test", folder / "few.tsv", "--tokenizer", tiny_data, "--out", folder / "data", "--quiet"),
    ]
    assert main(["data", "glue", *map(str, arguments)]) == 0
    return folder / "data"


def test_wrong_data_and_options_are_one_sentence(data, tmp_path, run_fairseq_many):
    cases, messages = [], []
    for name, (damage, more, message) in BAD.items():
        own = tmp_path / name.replace(" ", "-")
        shutil.copytree(data, own)
        if damage is not None:
            damage(own)
        if "changed" not in name:
            (own / "manifest.json").unlink(missing_ok=True)  # its checksums would tell first
        more = ["--num-classes", "3", "--save-dir", tmp_path / f"{own.name}-saved", *more]
        cases.append({"tool": "train", "args": [own, *TRAIN, *more]})
        messages.append(message.format(data=own))
    cases.append({"tool": "train", "args": [data, *TRAIN, "--num-classes", "3", "--save-dir", tmp_path / "good"]})
    *runs, good = run_fairseq_many(cases)
    assert good.rc == 0, good
    for run, message in zip(runs, messages, strict=True):
        assert run.rc == 1 and message in run.errors[-1] and "Traceback" not in run.stderr, (message, run.stderr[-600:])
