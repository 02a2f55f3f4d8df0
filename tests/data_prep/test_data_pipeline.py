"""From a folder of mixed text with defects to a trained model: each defect is reported, nothing is silently lost."""

import gzip
import json
import random
from collections import Counter

import pytest
from running import USER_DIR

from smlp.cli.main import main

PEOPLE = ["the old captain", "a young teacher", "my grandmother", "the new neighbour", "the doctor", "her brother"]
PLACES = ["the harbour", "a small village", "the market", "an empty theatre", "the railway station", "the garden"]
ACTS = ["walked slowly through", "had never seen", "wrote a letter about", "was waiting in", "spoke of", "returned to"]
TIMES = ["in the early morning", "after the war", "on a cold day", "before the holidays", "at the end of the week"]
THINGS = ["letters", "horses", "books", "lamps", "apples", "windows", "boats", "chairs"]
SENTENCES = [
    "{who} {did} {where} {when}.",
    "{when}, {who} bought {number} {things} and that was enough.",
    "there were {number} {things} in {where}, and {who} knew all of them.",
    "nobody but {who} could have said what {other} {did}.",
    "{who} asked {other} to be there {when} with {number} {things}.",
    "it is said that {where} was full of {things} {when}.",
]
LONG_LINE = 100 << 20


def story(draw, sentences=10):
    """English that no rule objects to, of some 100 words."""
    lines = []
    for _ in range(sentences):
        who, other = draw.sample(PEOPLE, 2)
        lists = {"did": ACTS, "where": PLACES, "when": TIMES, "things": THINGS}
        words = {name: draw.choice(values) for name, values in lists.items()}
        sentence = draw.choice(SENTENCES).format(who=who, other=other, number=draw.randrange(2, 999), **words)
        lines.append(sentence[0].upper() + sentence[1:])
    return "\n".join(lines)


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """A folder with 150 good documents and what real folders have besides."""
    folder, draw = tmp_path_factory.mktemp("raw"), random.Random(3)
    good = [story(draw) for _ in range(150)]
    rows = "".join(json.dumps({"text": text, "source": "web"}) + "\n" for text in good[:100])
    (folder / "web.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    (folder / "books").mkdir()
    (folder / "books" / "good.txt").write_text("\n\n".join(good[100:]))
    (folder / "copies.jsonl").write_text(
        json.dumps({"text": good[3]})
        + "\n"
        + json.dumps({"text": good[4].replace(",", " ;").upper().lower()})  # the same words
        + "\n"
        + json.dumps({"text": good[105].replace("letters", "notes")})  # nearly the same
        + "\n{broken\n"
        + json.dumps({"body": "no text here"})
        + "\n"
    )
    (folder / "empty.txt").touch()
    (folder / "latin1.txt").write_bytes(story(draw).encode() + b"\n\nThe caf\xe9 on the corner was closed.\n")
    (folder / "wide.txt").write_bytes(story(draw).encode("utf-16"))
    with open(folder / "line.txt", "wb") as file:
        file.write(story(draw).encode() + b"\n\n")
        for _ in range(LONG_LINE >> 20):
            file.write(b"endless " * (1 << 17))
        file.write(b"\n\n" + story(draw).encode())
    whole = gzip.compress("".join(json.dumps({"text": story(draw)}) + "\n" for _ in range(60)).encode(), mtime=0)
    (folder / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    german = "Der alte Mann ging am Morgen durch den Garten und sprach mit seiner Frau über das Wetter. " * 4
    (folder / "other.txt").write_text(f"{german}\n\nToo short.\n\n{'!@#$ %^&* ' * 60}\n")
    return folder


STEPS = ("clean", "dedup", "sample", "tokenizer", "binarize")


@pytest.fixture(scope="module")
def pipeline(raw, tmp_path_factory):
    """Folders and manifests of all steps."""
    out = tmp_path_factory.mktemp("pipeline")
    inputs = {
        "clean": [raw],
        "dedup": [out / "clean"],
        "sample": [out / "dedup"],
        "tokenizer": [out / "sample" / "train"],
    }
    options = {
        "clean": ["--without", "repeated-ngrams"],  # the stories repeat themselves
        "sample": ["--valid", "0.05", "--test", "0.05"],
        "tokenizer": ["--vocab-size", "300"],
        "binarize": ["--tokenizer", out / "tokenizer", "--shards", "2"],
    }
    for step in STEPS:
        paths = inputs.get(step, [out / "sample"])
        words = ["data", step, "--in", *paths, "--out", out / step, "--workers", "1", "--quiet", *options.get(step, [])]
        assert main(list(map(str, words))) == 0, step
    return out, {step: json.loads((out / step / "manifest.json").read_text()) for step in STEPS}


def test_counts_in_are_counts_out_at_every_step(pipeline):
    _, manifests = pipeline
    for step, manifest in manifests.items():
        counts = manifest["counts"]
        assert counts["documents_in"] == counts["kept"] + sum(counts["dropped"].values()), step
    for before, after in [("clean", "dedup"), ("dedup", "sample"), ("sample", "binarize")]:
        assert manifests[after]["counts"]["documents_in"] == manifests[before]["counts"]["kept"], after
    splits = manifests["sample"]["counts"]["other"]
    assert splits["train: documents"] == manifests["tokenizer"]["counts"]["documents_in"]


def test_every_defect_is_reported_by_file_and_reason(pipeline):
    _, manifests = pipeline
    clean = manifests["clean"]
    defects = sorted(
        (defect["where"].split(":")[0].rsplit("/", 1)[1], defect["problem"]) for defect in clean["defects"]
    )
    assert defects == [
        ("copies.jsonl", "1 document no text in field 'text'"),
        ("copies.jsonl", "1 document not JSON"),
        ("cut.jsonl.gz", "1 document lost where it breaks off"),
        ("cut.jsonl.gz", "damaged: it breaks off"),
        ("empty.txt", "empty file"),
        ("latin1.txt", "1 document not UTF-8"),
        ("line.txt", "1 document longer than 16,777,216 bytes"),
        ("wide.txt", "1 document not UTF-8"),
    ]
    dropped = Counter(clean["counts"]["dropped"])
    assert dropped["not UTF-8"] == 2  # a document in latin1.txt, and all of wide.txt
    assert dropped["longer than 16,777,216 bytes"] == 1
    assert dropped["not JSON"] == 1 and dropped["no text in field 'text'"] == 1
    assert dropped["cut off by damage"] == 1
    assert sum(dropped.values()) == 6 + 3  # and the German, the short and the symbols' document
    assert 150 + 3 + 1 + 2 < clean["counts"]["kept"] < 150 + 3 + 1 + 2 + 60
    assert sum(manifests["dedup"]["counts"]["dropped"].values()) == 3


def test_the_result_is_whole_and_trains(pipeline, run_fairseq_many):
    out, manifests = pipeline
    assert main(["data", "inspect", str(out / "binarize"), "--verify", "--json", str(out / "report.json")]) == 0
    shards = f"{out / 'binarize' / 'shard00'}:{out / 'binarize' / 'shard01'}"
    args = [
        *(shards, "--user-dir", USER_DIR, "--task", "language_modeling", "--arch", "smlp_tiny"),
        *(
            "--tokens-per-sample",
            "64",
            "--batch-size",
            "4",
            "--max-update",
            "20",
            "--optimizer",
            "adam",
            "--lr",
            "1e-3",
        ),
        *("--log-format", "json", "--log-interval", "1", "--num-workers", "0", "--save-dir", out / "run", "--no-save"),
        *("--sample-break-mode", "none", "--valid-subset", "valid", "--cpu"),
    ]
    (run,) = run_fairseq_many([{"tool": "train", "args": args, "timeout": 110}], timeout=120)
    assert run.rc == 0, run.stderr
    losses = [
        json.loads(line[line.index("{") :]) for line in run.stdout.splitlines() if '"gnorm"' in line and "{" in line
    ]
    losses = [float(entry["loss"]) for entry in losses if "loss" in entry]
    assert len(losses) >= 20 and losses[19] < losses[0] - 0.5
    assert manifests["binarize"]["counts"]["kept"] > 150
