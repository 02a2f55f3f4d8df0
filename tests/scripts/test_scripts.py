"""scripts/quickstart.sh and scripts/test.sh, and what they share in scripts/environment.sh."""

import errno
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from running import REPOSITORY, as_user, shell

from smlp.errors import UserError
from smlp.evaluation.perplexity import Perplexity, TextSize

pytestmark = pytest.mark.long


@pytest.fixture
def refused(monkeypatch, capsys):
    """``refused(words)`` runs a script as Python would, in this process; returns the sentence that it ends with."""

    def run(words):
        script, *arguments = words[1:]
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(script, run_name="__main__")
        assert "Traceback" not in capsys.readouterr().err
        return stop.value.code  # a string: it is printed, and the status is 1

    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    return run


@pytest.mark.slow
def test_quickstart_on_a_users_text_twice(tiny_text, tmp_path, refused):
    text = tmp_path / "mine.txt"
    lines = (tiny_text / "train.txt").read_text().splitlines()
    text.write_text("".join(f"{line} at {i // 20} and {i % 20}\n" for i, line in enumerate(lines * 3)))
    script = [sys.executable, str(REPOSITORY / "scripts" / "quickstart.py"), "--text", str(text)]
    script += ["--updates", "4", "--vocab-size", "80", "--out", str(tmp_path / "run"), "--prompt", "the s1"]
    first, second = (
        subprocess.run(script, capture_output=True, text=True, timeout=280, env=as_user(), cwd=tmp_path)
        for _ in range(2)
    )
    assert first.returncode == 0, (first.stdout, first.stderr[-3000:])
    table = (tmp_path / "run" / "result.md").read_text()
    for model in ("unigram", "bigram", "trigram", "5-gram", "smlp_hash_tiny", "gmlp_lm_tiny"):
        assert re.search(rf"^\| {model} \| [\d.,]+ \| [\d.,]+ \| [\d.,]+ \|", table, re.M), table
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000
    assert "> the s1" in first.stdout and "smlp generate --path" in first.stdout
    assert second.returncode == 0 and second.stdout.count("skipped") == 4, (second.stdout, second.stderr[-3000:])
    (tmp_path / "run" / "num_updates").write_text("many")
    assert re.search(r"error: step 2 failed, see \S+quickstart\.log", refused(script))
    for old, new, word in (("80", "70", "another vocab_size"), ("4", "5", "another updates")):
        assert word in refused([new if part == old else part for part in script])
    text.write_text(text.read_text() + "one line more\n")
    assert "another text" in refused(script)
    mistyped = [*script[:2], "--text", "tpyo.txt", "--out", str(tmp_path / "new")]
    assert re.search(r"there is no text file \S*tpyo\.txt", refused(mistyped))
    assert not (tmp_path / "new" / "settings.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("minutes", ["nan", "inf", "-5"])
def test_quickstart_needs_a_time(tmp_path, minutes):
    words = f"scripts/quickstart.py --out {tmp_path / 'out'} --minutes={minutes}"
    done = shell(f"{sys.executable} {REPOSITORY}/{words}", tmp_path)
    assert done.returncode == 2 and f"must be above 0 and at most 525,600, not {minutes}" in done.stderr
    assert not (tmp_path / "out").exists()


def test_quickstart_keeps_its_settings_while_a_model_is_there(tiny_text, tmp_path, refused):
    script = [sys.executable, str(REPOSITORY / "scripts" / "quickstart.py"), "--out", str(tmp_path / "run")]
    script += ["--text", str(tiny_text / "train.txt"), "--updates", "4", "--vocab-size"]
    (tmp_path / "run" / "smlp_hash_tiny").mkdir(parents=True)
    made_with = {"text": {}, "vocab_size": 80, "models": {}, "updates": 4}  # and the data were removed
    (tmp_path / "run" / "settings.json").write_text(json.dumps(made_with))
    assert "was made with another" in refused([*script, "70"])


def test_quickstart_makes_its_text_anew_where_nothing_was_made_of_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    quickstart = runpy.run_path(str(REPOSITORY / "scripts" / "quickstart.py"))
    mine, out = tmp_path / "mine.txt", tmp_path / "run"
    options = SimpleNamespace(
        text=[str(mine)], splits=None, out=out, updates=4, vocab_size=80, logs=lambda name: out / "logs" / name
    )
    (out / "logs").mkdir(parents=True)
    for word in ("one", "two"):
        mine.write_text("\n".join(f"{word} {number}" for number in range(60)))
        quickstart["check_settings"](options)
        quickstart["make_text"](options, out / "text")
        assert (out / "text" / "train.txt").read_text().startswith(f"{word} 0\n")

    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("smlp.files.os.fsync", full)
    with pytest.raises(UserError, match="num_updates: No space left on device"):
        quickstart["choose_num_updates"](options, None, out / "num_updates")
    assert not (out / "num_updates").exists(), "an empty one would end every later call"


def test_quickstart_leaves_a_users_folder_alone(tiny_text, tmp_path, refused):
    mine = tmp_path / "text" / "book.txt"
    mine.parent.mkdir()
    shutil.copy(tiny_text / "train.txt", mine)
    script = [sys.executable, str(REPOSITORY / "scripts" / "quickstart.py"), "--out", str(tmp_path)]
    for words in (["--text", str(mine)], ["--text", str(tiny_text / "train.txt")]):
        assert "has files of yours" in refused([*script, *words])
        (tmp_path / "settings.json").unlink(missing_ok=True)
    (tmp_path / "settings.json").write_text('{"theme": "dark"}')
    assert "settings.json is of something else" in refused([*script, "--splits", str(tiny_text)])
    (tmp_path / "settings.json").unlink()
    (tmp_path / "result.md").touch()
    assert "has a result.md of something else" in refused([*script, "--splits", str(tiny_text)])
    (tmp_path / "text" / "manifest.json").touch()
    for content in ("{}", "[", '{"text": "black"}', '{"theme": {"text": "black"}}'):
        (tmp_path / "settings.json").write_text(content)
        said = refused([*script, "--text", str(mine)])
        assert "settings.json is of something else" in said or "has files of yours" in said
        assert (tmp_path / "settings.json").read_text() == content and (tmp_path / "text" / "manifest.json").is_file()
        assert "settings.json is of something else" in refused([*script, "--splits", str(tiny_text)])
    assert mine.is_file()


def test_a_failed_step_names_step_and_log(tmp_path):
    source = f'source "{REPOSITORY}/scripts/environment.sh"; LOG_DIR={tmp_path}; '
    done = shell(source + 'run_step fetch bash -c "echo working; echo out of luck; exit 3"; echo not reached', tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"smlp: error: step 'fetch' failed, see {tmp_path}/fetch.log (last line: out of luck)\n"
    done = shell(source + "run_step fetch echo fine; echo reached", tmp_path)
    assert done.returncode == 0 and done.stdout == "reached\n"


def test_a_python_that_is_too_old_or_missing_is_named(tmp_path):
    done = shell(f'source "{REPOSITORY}/scripts/environment.sh"; unset PYTHON; PATH={tmp_path}; find_python', tmp_path)
    assert done.returncode == 1
    assert "Python 3.11 or 3.12 with venv is needed" in done.stderr


@pytest.mark.slow
def test_a_test_run_in_which_nothing_ran_fails(tmp_path):
    """scripts/test.sh, with its environment step replaced by the present one."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").touch()  # or a setup.py above makes the name of this test's folder a keyword
    (tmp_path / "tests" / "test_it.py").write_text(
        "import pytest\ndef test_a():\n    pytest.skip('no reason')\ndef test_b():\n    pass\n"
    )
    (scripts / "test.sh").write_text((REPOSITORY / "scripts" / "test.sh").read_text())
    bin_folder = Path(sys.executable).parent
    (scripts / "environment.sh").write_text(
        f'ROOT="{tmp_path}"; VENV="{bin_folder.parent}"; make_environment() {{ :; }}\n'
        'fail() { echo "smlp: error: $1" >&2; exit 1; }\n'
    )
    run = f"bash {scripts}/test.sh -p no:cacheprovider tests"
    assert shell(f"{run} -k test_b", tmp_path).returncode == 0
    assert shell(f"{run} --collect-only", tmp_path).returncode == 0
    skipped = shell(f"{run} -k test_a", tmp_path)
    assert skipped.returncode == 1 and "nothing ran" in skipped.stderr
    nothing = shell(f"{run} -k no_such_test", tmp_path)
    assert nothing.returncode == 1 and "tests failed" in nothing.stderr


def test_help_needs_no_installation(tmp_path):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name in ("quickstart.sh", "environment.sh"):
        (scripts / name).write_text((REPOSITORY / "scripts" / name).read_text())
    done = shell("bash scripts/quickstart.sh --help", tmp_path)
    assert done.returncode == 0 and "bash scripts/quickstart.sh --text FILE" in done.stdout, done.stderr
    assert not (tmp_path / ".venv").exists()


def test_an_installation_that_is_up_to_date_is_skipped(tmp_path):
    """make_environment with a python that only notes what it is asked to do."""
    for name in ("setup.py", "pyproject.toml", "requirements", "scripts"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "environment.sh").write_text((REPOSITORY / "scripts" / "environment.sh").read_text())
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    python.chmod(0o755)
    command = 'source copy/environment.sh; make_environment "plots"'
    first = shell(command, tmp_path)
    assert first.returncode == 0 and "installing into .venv" in first.stdout, first.stderr
    asked = (tmp_path / "asked").read_text()
    assert "--require-hashes" in asked and "constraints.txt" in asked and "[plots]" in asked
    (tmp_path / "asked").unlink()
    second = shell(command, tmp_path)
    assert second.returncode == 0 and "up to date, skipped" in second.stdout
    assert not (tmp_path / "asked").exists()


def test_cdpath_of_the_user_changes_no_folder():
    done = shell("export CDPATH=.; source scripts/environment.sh; echo $ROOT; bash examples/recipe.sh", REPOSITORY)
    assert done.stdout.splitlines()[0] == str(REPOSITORY) and len(done.stdout.splitlines()) == 1, done.stdout


def test_ngrams_compare_symbols_and_not_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    import ngram_baselines

    for name, text in {"first": "a 2\nb 1\n", "counts": "a 4\nb 3 \n", "order": "b 2\na 1\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "dict.txt").write_text(text)
    for name, message in {"counts": "there is no data file", "order": "order has another dictionary than"}.items():
        with pytest.raises(UserError, match=message):
            ngram_baselines.baselines([tmp_path / "first", tmp_path / name], "test", [1])


def test_ngrams_of_a_text_without_words(monkeypatch, capsys):
    monkeypatch.syspath_prepend(REPOSITORY / "scripts")
    import ngram_baselines

    row = Perplexity.of(np.log([0.5, 0.5]), TextSize(0, 1, 0))
    monkeypatch.setattr(ngram_baselines, "baselines", lambda *words: [("unigram", row)])
    monkeypatch.setattr("sys.argv", ["ngram_baselines.py", "data"])
    ngram_baselines.main()
    assert capsys.readouterr().out.splitlines()[-1] == "| unigram | 2.0 | - | - |"
