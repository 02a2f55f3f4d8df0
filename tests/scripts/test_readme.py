"""Commands shown in README.md are run here: those under the mark."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
from running import REPOSITORY, as_user, shell
from zeroshot_data import write_tasks

pytestmark = pytest.mark.long

MARK = "<!-- run by tests/scripts/test_readme.py -->\n"
BLOCK = re.compile(re.escape(MARK) + r"```(\w+)\n(.*?)```", re.S)
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
# What a reader leaves running for minutes runs here for moments.
SHORTER = {"--max-update 1000": "--max-update 2", "smlp leak-test": "smlp leak-test --positions 2"}
SHORTER_COMPARISON = {
    "text: {source: python, vocab_size: 4000}": "data: data-bin",
    "tokens: 90k": "tokens: 4096",
    "warmup_updates: 30": "warmup_updates: 1",
    "validations: 3, speed_rounds: 5": "validations: 1, speed_rounds: 1",
}


def blocks(language):
    return [text for kind, text in BLOCK.findall(README) if kind == language]


def for_wheel(command):
    return command.replace("--user-dir smlp", "--user-dir $(smlp user-dir)")  # docs/launching.md


def shortened(command):
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    assert "--max-update 1000" not in command
    return command


class Reader:
    """A folder as a reader has it, and the packages that are installed: a clone's or a wheel's."""

    def __init__(self, folder, packages):
        self.folder, self.packages = folder, packages

    def types(self, command):
        if self.packages != REPOSITORY:
            command = for_wheel(command)
        return shell(command, self.folder, timeout=270, packages=self.packages)


@pytest.fixture(scope="module")
def reader(request, tiny_data, tmp_path_factory):
    """With examples/, a data-bin/, tasks/ and corpora/; ``request.param`` is ``clone`` or ``wheel``."""
    folder = tmp_path_factory.mktemp("reader")
    packages = REPOSITORY if request.param == "clone" else request.getfixturevalue("built") / "site"
    found = Reader(folder, packages)
    if packages == REPOSITORY:
        (folder / "smlp").symlink_to(REPOSITORY / "smlp")
        shutil.copytree(REPOSITORY / "examples", folder / "examples")
    else:
        assert found.types("smlp examples . && smlp user-dir").stdout.endswith(f"{packages}/smlp\n")
    quick = folder / "examples" / "compare" / "quick.yaml"
    text = quick.read_text(encoding="utf-8")
    for long, short in SHORTER_COMPARISON.items():
        assert long in text
        text = text.replace(long, short)
    quick.write_text(text, encoding="utf-8")
    (folder / "data-bin").symlink_to(tiny_data)
    _lengthen(write_tasks(folder / "tasks"))
    (folder / "corpora").mkdir()
    for page in (REPOSITORY / "docs").glob("*.md"):
        (folder / "corpora" / f"{page.stem}.txt").write_text(page.read_text(encoding="utf-8"))
    return found


def _lengthen(tasks):
    """Makes a record of two tasks longer than the model's context, as some of the official ones are."""
    for file, field in (("piqa/valid.jsonl", "sol2"), ("hellaswag/hellaswag_val.jsonl", "endings")):
        first, *others = (tasks / file).read_text().splitlines(keepends=True)
        record = json.loads(first)
        long = "w1 " * 300
        record[field] = [long] * 4 if field == "endings" else long
        (tasks / file).write_text("".join([json.dumps(record) + "\n", *others]))


def test_the_mark_is_on_every_kind_of_block():
    assert len(blocks("bash")) == len(SAID) and len(blocks("python")) == 1
    assert README.count(MARK) == 8


# What a block prints, one for each in README's order.
SAID = (
    "Perplexity",
    "done training",
    "3 of 3 runs",
    "no unexpected leak",
    "|hellaswag|",
    "files are whole",
    "model.pt",
)
# What the empty environment of the last test runs with the wheel, and what reads the checkpoint of that.
CLONE_ONLY = ("Perplexity", "no unexpected leak", "|hellaswag|")
# These start their processes in the same way from a clone.
WHEEL_ONLY = ("3 of 3 runs", "files are whole", "model.pt")


def run_block(reader, number):
    text = shortened(blocks("bash")[number])
    done = reader.types(text)
    assert done.returncode == 0, (text, done.stdout[-1500:], done.stderr[-3000:])
    assert SAID[number] in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["clone"], indirect=True)
@pytest.mark.parametrize("number", [number for number, said in enumerate(SAID) if said not in WHEEL_ONLY])
def test_shown_commands_work(reader, number):
    """One after the other in one folder, as a reader runs them: later blocks read what the first has trained."""
    run_block(reader, number)


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["clone"], indirect=True)
def test_shown_python_works(reader):
    trained = reader.folder / "checkpoints" / "checkpoint_best.pt"
    assert trained.exists(), "the first of README's commands has not run"
    (text,) = blocks("python")
    command, environment = [sys.executable, "-c", text], as_user(reader.packages)
    done = subprocess.run(command, cwd=reader.folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["wheel"], indirect=True)
@pytest.mark.parametrize("number", [number for number, said in enumerate(SAID) if said not in CLONE_ONLY])
def test_shown_commands_work_with_a_wheel(reader, number):
    run_block(reader, number)


@pytest.mark.wheel
@pytest.mark.timeout(1800)
def test_an_empty_environment(built, tiny_text):
    """Build and install as README says; then run what it shows that needs no extra, outside of any clone."""
    (install,) = re.findall(r"```bash\n(python -m build\n.*?)```", README, re.S)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SMLP_"))}
    if index := os.environ.get("TORCH_INDEX"):
        environment["PIP_EXTRA_INDEX_URL"] = index
    with tempfile.TemporaryDirectory() as made:  # gone at once, unlike pytest's folders: 1.4 GB
        folder = Path(made)
        venv, work = folder / "venv", folder / "work"
        work.mkdir()
        environment |= {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1"}

        def types(command, cwd, timeout):
            words = ["bash", "-e", "-c", command]
            done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
            assert done.returncode == 0, (command, done.stdout[-1500:], done.stderr[-3000:])
            return done.stdout

        with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        (source,) = folder.glob("smlp_lm-*")
        types(f"{sys.executable} -m venv {venv} && pip install build && {install}", source, 1200)
        shutil.rmtree(source)
        assert types("smlp user-dir", work, 300).startswith(str(venv))
        splits = " ".join(f"--{split}pref {tiny_text / split}.txt" for split in ("train", "valid", "test"))
        types(f"smlp --help && {venv}/bin/fairseq-preprocess --only-source {splits} --destdir data-bin", work, 300)
        for number, said in enumerate(SAID):
            if said in ("Perplexity", "no unexpected leak"):
                assert said in types(for_wheel(shortened(blocks("bash")[number])), work, 600)


def test_links_lead_somewhere_and_nothing_is_left_to_fill_in():
    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
        assert not re.search(r"\b(QUICKSTART|TEST|KJV)_[A-Z]+\b", text), page.name
