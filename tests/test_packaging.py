"""The wheel: built from the source distribution, and used without a clone."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from running import REPOSITORY


def run(built: Path, cwd: Path, *words: object, **environment: str) -> str:
    """Run a command with the wheel's packages before all others; return what it printed."""
    own = {name: value for name, value in os.environ.items() if name != "SMLP_ROOT"}
    own |= {"PYTHONPATH": str(built / "site"), "OMP_NUM_THREADS": "1", **environment}
    own["PATH"] = f"{built / 'bin'}:{Path(sys.executable).parent}:{own['PATH']}"
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_in_the_wheel(built: Path):
    site, (metadata,) = built / "site", (built / "site").glob("*.dist-info/METADATA")
    assert metadata.parent.name.startswith("smlp_lm-")  # smlp on PyPI is another project
    text = metadata.read_text()
    assert all(f"\n{name}: " in text for name in ("Author", "Project-URL", "Classifier", "License-File"))
    assert (site / "smlp" / "py.typed").is_file() and list((site / "data_prep" / "sources").glob("*.toml"))
    for folder in ("examples", "scripts/slurm"):
        ours = {path.relative_to(REPOSITORY) for path in (REPOSITORY / folder).rglob("*") if path.is_file()}
        ours = {path for path in ours if "__pycache__" not in path.parts}
        packed = site / "smlp" / "project"
        assert {path.relative_to(packed) for path in (packed / folder).rglob("*") if path.is_file()} == ours
    assert not list(site.glob("tests")) and not list(site.glob("examples"))
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"requirements/constraints.txt", "scripts/quickstart.sh", "docs/models.md"} <= names


def test_a_wheel_needs_no_clone(built: Path, tmp_path: Path):
    smlp = (sys.executable, "-m", "smlp")
    assert run(built, tmp_path, *smlp, "user-dir").strip() == str(built / "site" / "smlp")
    assert "smlp_tiny" in run(built, tmp_path, *smlp, "flops", "--arch", "smlp_tiny")
    run(built, tmp_path, *smlp, "examples", "mine")
    (built / "bin").mkdir(exist_ok=True)
    program = built / "bin" / "smlp"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m smlp "$@"\n')
    program.chmod(0o755)
    recipe = ("bash", "mine/examples/smlp_tiny.sh", "DATA", "SAVED")
    assert f"--user-dir {built / 'site' / 'smlp'} " in run(built, tmp_path, *recipe, TRAIN_COMMAND="echo")
    where = "from smlp.experiments.slurm import scripts_folder; print(scripts_folder())"
    python = (sys.executable, "-c", where)
    assert run(built, tmp_path, *python).strip() == str(built / "site" / "smlp" / "project" / "scripts" / "slurm")
    mine = run(built, tmp_path, *python, SMLP_ROOT=str(tmp_path / "mine")).strip()
    assert mine == str(tmp_path / "mine" / "scripts" / "slurm")


def test_examples_are_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from smlp.cli.main import main

    assert main(["examples", str(tmp_path / "mine")]) == 0
    changed = tmp_path / "mine" / "scripts" / "slurm" / "site.sh"
    changed.write_text("module load cuda\n")
    capsys.readouterr()
    assert main(["examples", str(tmp_path / "mine")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"kept {changed}: ") and lines[1].startswith("0 of ") and len(lines) == 2
    assert changed.read_text() == "module load cuda\n"
    (tmp_path / "file").touch()
    assert main(["examples", str(tmp_path / "file")]) == 1
    assert "cannot make" in capsys.readouterr().err


def test_no_message_installs_another_project():
    """PyPI's ``smlp`` belongs to somebody else, so no text may offer ``pip install smlp`` or ``'smlp[...]'``."""
    offered = "pip install " + "smlp"
    for folder in ("smlp", "data_prep", "scripts", "docs", "examples"):
        for path in (REPOSITORY / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".sh", ".ipynb"):
                text = path.read_text(encoding="utf-8").replace("'", "").replace('"', "")
                assert offered not in text.replace("smlp-lm", ""), path


def test_what_is_imported_is_declared():
    """Every package that a file imports is one that setup.py names, and every requirement is imported."""
    providers = importlib.metadata.packages_distributions()
    required = {canonical(line) for line in importlib.metadata.requires("smlp-lm") or []}
    imported = set()
    for path in [*(REPOSITORY / "smlp").rglob("*.py"), *(REPOSITORY / "data_prep").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported |= {name.partition(".")[0] for name in names}
    imported -= {*sys.stdlib_module_names, "smlp", "data_prep"}
    for name in imported:
        assert required & {canonical(provider) for provider in providers[name]}, f"{name} is imported, and not declared"


def canonical(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")
