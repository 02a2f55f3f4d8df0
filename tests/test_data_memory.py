"""Memory of the steps of ``smlp data`` does not grow with the corpus: 2 GB go through within 1 GiB."""

import json
import random
import string
import sys

import pytest
from running import run_python

GIB = 1 << 30
CORPUS_BYTES = 2_000_000_000
# The limit holds for each process: this one and, inherited, the workers. Prints the largest peak of any, in KiB: of
# this process from /proc, for what getrusage says of a process begins with the peak of the one that started it.
LIMITED = """
import re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from smlp.cli.main import main
status = main(sys.argv[1:])
own = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1))
print("peak", max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(status)
"""
# what takes most of the time and holds nothing from one document to the next
SLOW_RULES = (
    *("repeated-ngrams", "many-repeated-lines", "repeated-lines", "navigation", "mojibake", "symbols", "stop-words"),
    *(
        "entities",
        "cookies",
        "policies",
        "copyright",
        "javascript",
        "placeholder",
        "invitations",
        "upper-case",
        "digits",
    ),
)
WORDS = "the of and that have with to be a in he she it was were from their would there which"
COMMON = tuple(WORDS.split())


def write_corpus(path, num_bytes):
    """Documents of 20 kB each in sentences of common and rare words, no two alike; returns how many."""
    draw = random.Random(4)
    rare = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 9))) for _ in range(4000)]

    def sentence():
        return " ".join(draw.choices(COMMON if draw.random() < 0.5 else rare, k=1)[0] for _ in range(20)) + "."

    def paragraph(sentences):
        return " ".join(draw.choices(sentences, k=6))

    sentences = [sentence().capitalize() for _ in range(4000)]
    bodies = [json.dumps("\n".join(paragraph(sentences) for _ in range(30)))[1:-1] for _ in range(500)]
    number = 0
    with open(path, "w") as file:
        while file.tell() < num_bytes:
            file.write("".join(f'{{"text": "Number {number + k}.\\n{body}"}}\n' for k, body in enumerate(bodies)))
            number += len(bodies)
    return number


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.timeout(900)
def test_two_gigabytes_are_cleaned_within_one(tmp_path):
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "out"
    try:
        number = write_corpus(corpus, CORPUS_BYTES)
        assert corpus.stat().st_size >= CORPUS_BYTES
        options = ["--language", "any", "--without", *SLOW_RULES, "--compress", "none", "--workers", "2"]
        command = ["data", "clean", "--in", corpus, "--out", out, "--quiet", *options]
        done = run_python("-c", LIMITED, *command, timeout=800)
        assert done.rc == 0, done.stderr
        counts = json.loads((out / "manifest.json").read_text())["counts"]
        assert counts["documents_in"] == number == counts["kept"]
        peak = int(done.stdout.split("peak ")[1]) * 1024
        assert peak < GIB / 2, f"{peak / 1e6:,.0f} MB"
    finally:
        corpus.unlink()
        for path in out.glob("*.jsonl"):
            path.unlink()
