"""Memory of the steps of ``smlp data`` does not grow with the corpus.

Every step reads a corpus, a worker a whole file of it at a time, and the largest peak of any of its processes is
compared with a limit: with all slow tests 32 MB may take 14 MB more than 8 MB do (``SMALL``); in ``scripts/test.sh
--large`` 2 GB go through within 1 GiB (``LARGE``).
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import string
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from running import run_python

from smlp.cli.main import main

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")]

# argv: a limit in bytes on the address space of each process (this one and, inherited, the workers; 0 for none), and
# the command. Prints the largest peak of any in KiB: of this process from /proc, for what getrusage says of a process
# begins with the peak of the one that started it.
MEASURED = """
import re, resource, sys
limit = int(sys.argv[1])
if limit:
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from smlp.cli.main import main
status = main(sys.argv[2:])
own = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1))
print("\\npeak", max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(status)
"""
# what takes most of the time and holds nothing from one document to the next
SLOW_RULES = (
    *("repeated-ngrams", "many-repeated-lines", "repeated-lines", "navigation", "mojibake", "symbols", "stop-words"),
    *("entities", "cookies", "policies", "copyright", "javascript", "placeholder", "invitations", "upper-case"),
    "digits",
)
COMMON = "the of and that have with to be in he she it was were from their would there which said not but all"
COPIES = 20  # after every 20th document it comes once more
PLAIN = ("--compress", "none")
WHOLE_FILES = ("--part-bytes", str(1 << 40))


@dataclass(frozen=True)
class Scale:
    """``files`` of ``file_bytes`` each, a worker for each; ``growth`` above a corpus of ``SMALLEST`` or ``limit``."""

    files: int
    file_bytes: int
    growth: int = 0
    limit: int = 0


SMALLEST = Scale(1, 8_000_000)  # enough to fill every buffer
SMALL = Scale(1, 32_000_000, growth=14_000_000)
LARGE = Scale(2, 1_000_000_000, limit=1 << 30)


def documents(seed: int) -> Iterator[str]:
    """Lines of .jsonl with texts of 0.4 to 8 kB, sentences of common and rare words in an order of their own."""
    draw, common = random.Random(seed), COMMON.split()
    rare = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 9))) for _ in range(400)]
    sentences = [" ".join(draw.choices(common, k=9) + draw.choices(rare, k=9)) + ". " for _ in range(20_000)]
    number = 0
    while True:
        number += 1
        paragraphs = ["".join(draw.choices(sentences, k=draw.randint(4, 12))).rstrip() for _ in range(number % 7 + 1)]
        text = "\\n".join([f"Number {seed} {number}.", *paragraphs])
        line = f'{{"text": "{text}"}}\n'
        yield line
        if number % COPIES == 0:
            yield line


def write_corpus(folder: Path, scale: Scale) -> dict[str, int]:
    """Files of documents; returns how many there are, and how many of them are copies."""
    folder.mkdir()
    found = {"documents": 0, "copies": 0}
    for number in range(scale.files):
        before = ""
        with open(folder / f"{number}.jsonl", "w") as file:
            for line in documents(number):
                if file.tell() >= scale.file_bytes:
                    break
                file.write(line)
                found["documents"] += 1
                found["copies"] += line == before
                before = line
    return found


class Peaks:
    """Runs steps and says what they held at most; a corpus is written once for all."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self._numbers: dict[Scale, dict[str, int]] = {}
        self._peaks: dict[tuple[str, Scale], int] = {}

    def of(self, step: str, scale: Scale) -> int:
        """Bytes."""
        if (step, scale) not in self._peaks:
            if step == "inspect":
                self.of("binarize", scale)
            self._peaks[step, scale] = self._run(step, scale)
        return self._peaks[step, scale]

    def _run(self, step: str, scale: Scale) -> int:
        corpus = self.folder / f"corpus-{scale.file_bytes}"
        if scale not in self._numbers:
            self._numbers[scale] = write_corpus(corpus, scale)
        out = self.folder / f"{step.replace(' ', '-')}-{scale.file_bytes}"
        command = ["data", step.split()[0], *COMMANDS[step](corpus, out, self)]
        if step != "inspect":
            command += ["--workers", str(scale.files), "--quiet"]
        started = time.perf_counter()
        done = run_python("-c", MEASURED, str(scale.limit), *command, timeout=1200)
        seconds = time.perf_counter() - started
        assert done.rc == 0, done.stdout + done.stderr
        peak = int(done.stdout.rpartition("peak ")[2]) * 1024
        print(f"{step}: {scale.files} x {scale.file_bytes:,} bytes: {peak / 1e6:,.0f} MB, {seconds:,.1f} s")
        self._check(step, scale, out, done.stdout)
        if step != "binarize":  # which inspect reads
            shutil.rmtree(out, ignore_errors=True)
        return peak

    def _check(self, step: str, scale: Scale, out: Path, printed: str) -> None:
        """That nothing was left out."""
        if step == "inspect":
            assert "2 files are whole" in printed
            return
        numbers = self._numbers[scale]
        counts = json.loads(next(out.rglob("manifest.json")).read_text())["counts"]
        assert counts["documents_in"] == numbers["documents"]
        if step.startswith("dedup"):
            assert counts["dropped"] == {"exact duplicate": numbers["copies"]}
        elif step != "tokenizer":  # which draws a sample
            assert counts["kept"] == numbers["documents"]


def _binarize(corpus: Path, out: Path, peaks: Peaks) -> list[str | Path]:
    return ["--train", corpus, "--tokenizer", peaks.tokenizer, "--out", out, "--shards", "2", *WHOLE_FILES]


Command = Callable[[Path, Path, Peaks], list]
COMMANDS: dict[str, Command] = {
    "fetch": lambda corpus, out, _: [corpus, "--out", out, "--file-bytes", str(1 << 40), *PLAIN],
    "clean": lambda corpus, out, _: [
        *("--in", corpus, "--out", out, "--language", "any", "--without", *SLOW_RULES, *PLAIN, *WHOLE_FILES)
    ],
    "dedup exact": lambda corpus, out, _: ["--in", corpus, "--out", out, "--no-near", *PLAIN, *WHOLE_FILES],
    "dedup near": lambda corpus, out, _: ["--in", corpus, "--out", out, "--num-perm", "32", *PLAIN, *WHOLE_FILES],
    "sample": lambda corpus, out, _: ["--in", corpus, "--out", out, *PLAIN, *WHOLE_FILES],
    "tokenizer": lambda corpus, out, _: [
        *("--in", corpus, "--out", out, "--vocab-size", "2000", "--sample-bytes", "500000", *WHOLE_FILES)
    ],
    "binarize": _binarize,
    "inspect": lambda corpus, out, peaks: [
        *(peaks.folder / out.name.replace("inspect", "binarize"), "--verify", "--samples", "2")
    ],
}


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peaks]:
    """With a tokenizer of 1,000 pieces; what is left on the disk is removed in the end."""
    folder = tmp_path_factory.mktemp("memory")
    text = "".join(itertools.islice(documents(1), 100))
    (folder / "text.jsonl").write_text(text)
    options = ["--in", folder / "text.jsonl", "--out", folder / "tokenizer", "--vocab-size", "1000", "--workers", "1"]
    assert main(["data", "tokenizer", *map(str, options), "--quiet"]) == 0
    yield Peaks(folder, folder / "tokenizer")
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "scale",
    [
        pytest.param(SMALL, marks=pytest.mark.slow, id="small"),
        pytest.param(LARGE, marks=[pytest.mark.large, pytest.mark.timeout(3000)], id="large"),
    ],
)
@pytest.mark.parametrize("step", COMMANDS)
def test_memory_does_not_grow_with_the_corpus(peaks, step, scale):
    peak = peaks.of(step, scale)
    if scale.growth:
        grown = peak - peaks.of(step, SMALLEST)
        print(f"{step}: {grown / 1e6:,.1f} MB more than with {SMALLEST.file_bytes:,} bytes")
        assert grown < scale.growth
    else:
        assert peak < scale.limit
