"""Shared fixtures: a tiny corpus, and ways to run fairseq's own command-line tools."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import HELPERS, REPOSITORY, TINY_LM, USER_DIR, Finished, run_python, start_python

from smlp.launch.machine import let_torchvision_load

os.environ["SMLP_TRACEBACK"] = "1"  # errors that nobody foresaw are seen as such
PAGES = ("README", "CHANGELOG", "SECURITY")
let_torchvision_load()  # before any test file imports timm or torchmetrics


def tiny_sentences(count: int, seed: int) -> list[str]:
    """Sentences with something to learn: the subject decides the verb and the object."""
    draw = random.Random(seed)
    sentences = []
    for _ in range(count):
        i = draw.randrange(30)
        words = ["the", f"s{i}", f"v{i % 20}", "a", f"o{i * 3 % 40}", "and", f"o{draw.randrange(40)}"]
        sentences.append(" ".join(words[: draw.randint(4, 7)]))
    return sentences


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let each of several processes begin with the files marked as long, so that none is left to the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, the wheel, and the wheel's packages in ``site``."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for folder in ("smlp", "data_prep", "examples", "scripts", "docs", "requirements"):
        shutil.copytree(REPOSITORY / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (
        "setup.py",
        "pyproject.toml",
        "MANIFEST.in",
        "CITATION.cff",
        *(f"{page}.md" for page in PAGES),
        "LICENSE",
    ):
        shutil.copy(REPOSITORY / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        wheel.extractall(out / "site")
    return out


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with train.txt, valid.txt and test.txt: a few hundred lines, about 100 different words."""
    directory = tmp_path_factory.mktemp("tiny_text")
    for seed, (split, count) in enumerate({"train": 300, "valid": 60, "test": 60}.items()):
        (directory / f"{split}.txt").write_text("\n".join(tiny_sentences(count, seed)) + "\n", encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def tiny_data(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same text binarised by fairseq's preprocess (mmap format): dict.txt and train, valid, test."""
    from fairseq import options
    from fairseq_cli import preprocess

    directory = tmp_path_factory.mktemp("tiny_data") / "bin"
    prefixes = [f"--{split}pref={tiny_text / split}.txt" for split in ("train", "valid", "test")]
    arguments = ["--only-source", *prefixes, "--destdir", str(directory)]
    preprocess.main(options.get_preprocessing_parser().parse_args(arguments))
    return directory


@pytest.fixture(scope="session")
def run_fairseq() -> Callable[..., Finished]:
    """``run_fairseq(tool, *args, timeout=120)`` runs ``python -m fairseq_cli.TOOL ARGS`` (4 to 5 s to start)."""

    def run(tool: str, *args: object, timeout: float = 120) -> Finished:
        return run_python("-m", f"fairseq_cli.{tool}", *map(str, args), timeout=timeout)

    return run


@pytest.fixture(scope="session")
def run_fairseq_many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Finished]]]:
    """``run_fairseq_many(cases, timeout=120)`` runs fairseq tools that do not depend on each other, as many at a time
    as there are cores; only the first call of the session pays for a start.

    A case is ``{"tool": "train", "args": [...]}`` with, if wanted, ``ranks`` (processes, as torchrun would start them),
    ``file_size_limit`` (bytes the process may write to one file), ``record`` (a folder for what
    :mod:`recording` keeps of each rank), ``samples`` (a file for the sequences of every update), ``fault`` (see
    :mod:`faults`), ``environment`` (more variables), ``folder`` (to be in), ``timeout`` in seconds, and
    ``args_of_last``, in place of ``args`` on the last rank.
    """
    log = tmp_path_factory.mktemp("forks") / "server.log"
    with log.open("w") as errors, start_python(HELPERS / "fairseq_forks.py", stderr=errors) as server:

        def run(cases: list[dict], timeout: float = 120) -> list[Finished]:
            cases = [{**case, "args": [str(argument) for argument in case["args"]]} for case in cases]
            request = {"folder": str(tmp_path_factory.mktemp("runs")), "cases": cases}
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            ready, _, _ = select.select([server.stdout], [], [], timeout)
            answer = server.stdout.readline() if ready else ""
            assert answer, f"no answer within {timeout} s: {log.read_text()}"
            return [Finished(**result) for result in json.loads(answer)]

        try:
            yield run
        finally:
            server.stdin.close()
            try:
                server.wait(timeout=10)
            except subprocess.TimeoutExpired:
                server.kill()


@pytest.fixture(scope="session")
def tiny_run(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory, run_fairseq_many) -> tuple[Path, Finished]:
    """A run of four updates of fairseq's own small model, with the plug-in loaded: its save-dir and what it printed."""
    save_dir = tmp_path_factory.mktemp("tiny_run")
    args = [tiny_data, "--user-dir", USER_DIR, *TINY_LM, "--max-update", "4", "--save-dir", save_dir]
    (run,) = run_fairseq_many([{"tool": "train", "args": args}])
    assert run.rc == 0, run.stderr
    return save_dir, run


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A checkpoint of a trained ``base_lm_tiny`` in one file."""
    from checkpoint_states import save

    return save(tmp_path, "base_lm_tiny")


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> Path:
    """The same with its experts in four files, in a folder of its own."""
    from checkpoint_states import in_parts

    return in_parts(whole, tmp_path / "parts")


@pytest.fixture
def own_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever plugins register in a test is gone after it."""
    from smlp.config import registry

    registry.load()
    modules = dict(sys.modules)
    for table in registry._TABLES:
        monkeypatch.setattr(table, "_parts", dict(table._parts))
    monkeypatch.setattr(registry, "_loaded", None)
    yield
    for name in sys.modules.keys() - modules.keys():
        if name.startswith("smlp_plugin_"):
            del sys.modules[name]


@pytest.fixture
def sigint_is_heard() -> Iterator[None]:
    """SIGINT raises ``KeyboardInterrupt``; a shell ignores it for what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def plugged_in(own_tables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``SMLP_PLUGINS`` names the files of examples/extend/."""
    from plugin_files import FILES

    from smlp.config import plugins

    monkeypatch.setenv(plugins.VARIABLE, FILES)
