"""Container files: what they install is what there is, and the image's torch stays; no image is built."""

import os
import re
import subprocess
import sys

import pytest
from running import REPOSITORY

FOLDER = REPOSITORY / "scripts" / "containers"
PIP = ["--dry-run", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]


def install(python, *words):
    environment = {**os.environ, "PYTHON": str(python)}
    command = ["bash", str(FOLDER / "install.sh"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def fake_python(path, answers):
    """A Python whose answers to the script's questions about torch are given, one after the other."""
    path.write_text(f"""#!/usr/bin/env bash
case "$2" in
*torch.__version__*)
    line=$(head -n 1 {path}.answers); sed -i 1d {path}.answers
    [ "$line" != none ] && echo "$line" ;;
*) exec {sys.executable} "$@" ;;
esac
""")
    path.chmod(0o755)
    path.with_name(path.name + ".answers").write_text("".join(f"{answer}\n" for answer in answers))
    return path


def test_torch_is_a_constraint():
    done = install(sys.executable, "", *PIP)
    assert done.returncode == 0, done.stderr
    kept = re.search(r"^packages that must not change: (.*)$", done.stdout, re.M)[1].split()
    assert any(one.startswith("torch==") for one in kept)
    assert all(re.match(r"(torch|triton|nvidia|pytorch)", one) for one in kept)
    assert "smlp is installed next to torch " in done.stdout


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (["none"], "has no torch: choose an image with PyTorch"),
        (["2.9.1 12.8", "2.13.0 None"], "has replaced torch 2.9.1 12.8 by torch 2.13.0 None"),
        (["2.9.1 12.8", "none"], "torch 2.9.1 12.8 can no longer be imported"),
    ],
)
def test_a_torch_that_is_missing_or_changes_is_an_error(tmp_path, answers, message):
    done = install(fake_python(tmp_path / "python", answers), "", *PIP)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("smlp: error: ") and message in done.stderr


@pytest.mark.parametrize(
    ("listed", "limits"),
    [
        ("torch==2.9.1+cu128", ["torch==2.9.1+cu128", "torchaudio<=2.9.1"]),
        ("torch==2.9.1\ntorchaudio==2.9.0", ["torch==2.9.1", "torchaudio==2.9.0"]),
        ("torch==2.9.0a0+50eac811a6.nv25.9", ["torch==2.9.0a0+50eac811a6.nv25.9"]),
    ],
)
def test_torchaudio_fits_the_torch_that_is_there(tmp_path, listed, limits):
    """Its newest version does not load beside an older torch."""
    python = tmp_path / "python"
    python.write_text(f"""#!/usr/bin/env bash
case "$*" in
*torch.__version__*) echo 2.9.1 12.8 ;;
"-m pip list"*) printf '%s\\n' '{listed}' ;;
"-m pip install"*) cat "$6" ;;
esac
""")
    python.chmod(0o755)
    done = install(python, "")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:-1] == limits


def test_both_recipes_install_the_same_extras():
    extras = [
        re.search(r"(?i)^\s*(?:ARG )?extras=(\S+)$", (FOLDER / name).read_text(), re.M)[1].split(",")
        for name in ("Dockerfile", "smlp.def")
    ]
    declared = set(re.findall(r'^        "([\w-]+)": ', (REPOSITORY / "setup.py").read_text(), re.M))
    assert extras[0] == extras[1] and set(extras[0]) <= declared
    images = [
        re.search(r"(?i)^\s*(?:ARG )?image=(\S+)$", (FOLDER / name).read_text(), re.M)[1]
        for name in ("Dockerfile", "smlp.def")
    ]
    assert images[0] == images[1]
