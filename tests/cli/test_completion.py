"""``smlp completion``: what bash offers after it has read the script."""

import shutil
import subprocess

import pytest
from running import run_python

pytest.importorskip("shtab")

OFFERED = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
_shtab_smlp smlp "${COMP_WORDS[COMP_CWORD]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    done = run_python("-m", "smlp", "completion", "bash")
    assert done.rc == 0, done.stderr
    path = tmp_path_factory.mktemp("completion") / "smlp"
    path.write_text(done.stdout)
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["smlp", "gen"], {"generate"}),
        (["smlp", "compare", ""], {"run", "status", "report"}),
        (["smlp", "compare", "run", "--dr"], {"--dry-run"}),
        (["smlp", "generate", "--top"], {"--top-k", "--top-p"}),
        (["smlp", "generate", "--dtype", "b"], {"bf16"}),
        (["smlp", "vision", "train", "--img-s"], {"--img-size"}),
    ],
)
def test_what_bash_offers(script, words, offered):
    done = subprocess.run(
        ["bash", "--norc", "-c", OFFERED, "bash", script, *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == offered


def test_zsh_has_a_script_too(capsys):
    from smlp.cli.main import main

    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef smlp\n")
