"""The ``smlp`` command: what it hands on to fairseq, what it adds, and how it fails."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from running import USER_DIR, run_python

import smlp
from smlp.cli import doctor, main, train
from smlp.errors import UserError
from smlp.fairseq_compat import command_line

pytestmark = pytest.mark.timeout(180)

SMALL = ["--embed-dim", "16", "--ffn-dim", "32", "--num-dense-layers", "1", "--num-sparse-layers", "1"]
SMALL += ["--num-experts", "2", "--tokens-per-sample", "16", "--no-epoch-checkpoints", "--num-workers", "0"]


def test_help_is_immediate_and_complete() -> None:
    """Nothing that takes long is imported for it."""
    slow = "{'torch', 'numpy', 'fairseq'}"
    look = f"import atexit, sys; atexit.register(lambda: print('imported:', {slow} & set(sys.modules)))"
    run = run_python("-c", f"{look}; from smlp.cli.main import main; main(['--help'])")
    assert run.rc == 0 and "imported: set()" in run.stdout
    for name in main.COMMANDS:
        assert f"  {name} " in run.stdout


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_shows_an_example(name: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main([name, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert re.search(r"^examples?:$", shown, re.MULTILINE)
    assert "smlp" in shown.partition("xample")[2]


def test_an_error_that_nobody_foresaw_is_one_sentence(monkeypatch, capsys) -> None:
    def fail(path: str) -> None:
        raise TypeError("no such unit")

    monkeypatch.setattr("smlp.cli.user_dir.run", fail)
    with pytest.raises(TypeError):
        main.main(["user-dir"])
    monkeypatch.delenv("SMLP_TRACEBACK")
    assert main.main(["user-dir"]) == 1
    reported = re.sub(r"line \d+", "line 1", capsys.readouterr().err)
    place = "unexpected TypeError in smlp/cli/main.py, line 1"
    assert reported == f"smlp: error: {place}: no such unit (SMLP_TRACEBACK=1 shows where)\n"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["trian"], ["'trian'", "did you mean 'train'"]),
        (["train", "nowhere"], ["nowhere", "fairseq-preprocess"]),
        (["train"], ["required: data", "smlp train --help"]),
        (["train", "nowhere", "--max-updates", "3"], ["--max-updates"]),
        (["train", "nowhere", "--arch", "smlp_tyni"], ["smlp_tyni", "did you mean 'smlp_tiny'"]),
        (["train", "nowhere", "--user-dir", "elsewhere/smlp"], ["elsewhere/smlp", "leave --user-dir out"]),
        (["eval-lm", "nowhere", "--path", "none.pt"], ["none.pt"]),
        (["doctor", "--json", "no/such/directory/x.json"], ["--json no/such/directory/x.json"]),
        (["doctor", "--nproc=100000"], ["--nproc must be at most 1,024, got 100000"]),
        (["flops", "--arch", "smlp_tiny", "--tokens", f"{10**12}"], ["--tokens must be at most 16,777,216, got 1000"]),
        (["flops", "--arch", "smlp_tiny", "--batch", "0"], ["--batch must be at least 1, got 0"]),
        (["leak-test", "--arch", "smlp_tiny", "--seed", f"{2**70}"], ["--seed must be at most 18,446,744,073,709"]),
        (["match", "--flops-per-token", "nan"], ["--flops-per-token must be above 0, got nan"]),
        (["match", "--flops-per-token", "inf"], ["--flops-per-token must be at most 1e+18, got inf"]),
        (["costs", "--arch", "smlp_tiny", "--timeout=-inf"], ["--timeout must be at least 1, got -inf"]),
        (["data", "inspect", "x", "--samples=-1"], ["--samples must be at least 0, got -1"]),
        (["match", "--like", ""], ["the argument after --like is empty"]),
        (["eval-lm", "--text", "book.txt", "--path", "x.pt", "--dict="], ["--dict is empty"]),
        (["examples", ""], ["the argument after examples is empty"]),
        (["doctor", "--dir", "x"], ["--dir is for smlp doctor --parallel"]),
        (["compare", "run", "x" * 5000], ["x" * 300 + ": File name too long"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_line_and_status_1(argv: list[str], parts: list[str], capsys, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "machine_checks", lambda: iter([]))
    assert main.main(argv) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("smlp train: using")]
    assert len(error) == 1
    assert error[0].startswith("smlp: error: ")
    for part in parts:
        assert part in error[0]


def test_what_an_encoding_lacks_is_escaped(monkeypatch) -> None:
    """Names of files need not be text, and a terminal may lack what a model writes."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr("smlp.cli.user_dir.run", lambda args: print("caf\xe9 \udcff") or 0)
    assert main.main(["user-dir"]) == 0
    assert stream.buffer.getvalue() == b"caf\\xe9 \\udcff\n"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), "there is not enough memory for this"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 40 bytes. Error"), "40 bytes"),
        (PermissionError(13, "Permission denied", "some/file"), "some/file: Permission denied"),
        (OSError(27, "File too large"), "input/output: File too large"),
        (RuntimeError("Symlink loop from 'a'"), "Symlink loop from 'a'"),
    ],
)
def test_what_the_system_refuses_is_one_line(error, sentence, monkeypatch, capsys) -> None:
    def refuse(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(main, "_dispatch", refuse)
    assert main.main([]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("smlp: error: ") and sentence in shown and shown.count("\n") == 1


def test_interruption_is_quiet(monkeypatch, capsys) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "_dispatch", interrupted)
    assert main.main([]) == 130
    assert capsys.readouterr().err == ""


def test_failed_processes_are_known_where_the_parent_ignores_them(monkeypatch) -> None:
    """A service that ignores SIGCHLD hands that on; the system then forgets how processes end."""
    failing = [sys.executable, "-S", "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(main, "_dispatch", lambda argv: subprocess.run(failing, timeout=60).returncode)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert main.main([]) == 3
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_closed_pipe_is_quiet() -> None:
    """The reader has gone before the first line is written."""
    script = "import sys, time; sys.stdin.readline(); from smlp.cli.main import main; sys.exit(main(['user-dir']))"
    command = [sys.executable, "-c", script]
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    with subprocess.Popen(command, cwd=Path(USER_DIR).parent, text=True, **pipes) as process:
        process.stdout.close()
        process.stdin.write("go\n")
        process.stdin.close()
        assert process.wait(timeout=30) == 141
        assert process.stderr.read() == ""


@pytest.mark.slow
def test_closed_streams_are_empty_ones(tmp_path: Path) -> None:
    """What is opened next would otherwise take the place of the standard output."""
    shell = f"{sys.executable} -m smlp"
    for streams, status in ((">&-", 0), ("<&- >&- 2>&-", 0)):
        command = f"{shell} flops --arch gmlp_lm_tiny --json flops.json {streams}"
        assert subprocess.run(command, shell=True, cwd=tmp_path, timeout=60).returncode == status
        assert json.loads((tmp_path / "flops.json").read_text())
        (tmp_path / "flops.json").unlink()
    (tmp_path / "\udcff.txt").write_text("".join(f"Line {n}.\n" for n in range(60)))  # no terminal shows that letter
    for streams in (">&-", "> log"):
        command = f"PYTHONIOENCODING=utf-8 {sys.executable} -m data_prep.text_files --text *.txt --out out {streams}"
        done = subprocess.run(command, shell=True, cwd=tmp_path, timeout=60, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_a_folder_that_is_gone_and_a_locale_without_the_letters(tmp_path: Path) -> None:
    gone = f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m smlp flops --arch gmlp_lm_tiny"
    ascii_only = f"LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {sys.executable} -m smlp flops --arch é"
    for command, words in ((gone, "has been removed: cd to another one"), (ascii_only, "set LC_ALL=C.UTF-8")):
        done = subprocess.run(command, shell=True, cwd=tmp_path, timeout=60, capture_output=True, text=True)
        assert done.returncode == 1 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_user_dir_is_the_package(capsys) -> None:
    assert main.main(["user-dir"]) == 0
    assert Path(capsys.readouterr().out.strip()) == Path(smlp.__file__).parent


def test_arguments_pass_through_untouched(monkeypatch) -> None:
    handed = []
    monkeypatch.setattr(train, "run_training", lambda arguments, before: handed.append(arguments))
    given = ["data", "--task", "t", "-a", "x", "--max-tokens=9", "--optimizer", "sgd", "--lr=1", "--weird", "-1", "--"]
    assert main.main(["train", *given]) == 0
    assert handed == [given]


def test_defaults_fill_only_what_is_missing() -> None:
    lr = ["--optimizer", "adam", "--lr", "5e-4"]
    lm = ["--task", "language_modeling"]
    tiny = ["--tokens-per-sample", "128", "--batch-size", "32"]
    assert train.default_arguments(["data"]) == [*lm, "--arch", "smlp_tiny", *tiny, *lr]
    assert train.default_arguments(["data", "--arch=gmlp_lm"])[2:6] == [
        *("--tokens-per-sample", "1024", "--batch-size", "4"),
    ]
    assert train.default_arguments(["data", "--arch", "transformer_lm"]) == [*lm, "--max-tokens", "4096", *lr]
    assert train.default_arguments(["data", "-a", "smlp", "--tokens-per-sample", "64"])[2:4] == ["--batch-size", "64"]


def test_user_dir_is_added_once(tmp_path: Path, monkeypatch) -> None:
    own = command_line.package_dir()
    assert command_line._with_user_dir(["data"]) == ["--user-dir", own, "data"]
    assert command_line._with_user_dir(["data", "--user-dir", own + "/"])[-2:] == ["--user-dir", own]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no folder another, which --user-dir names"):
        command_line._with_user_dir(["data", "--user-dir=another"])
    (tmp_path / "another").mkdir()
    assert command_line._with_user_dir(["data", "--user-dir=another"]) == ["data", "--user-dir=another"]


def test_train_then_evaluate(tiny_data: Path, tmp_path: Path, capsys) -> None:
    """Training in a process of its own: nothing of fairseq is loaded before the command starts."""
    data = tmp_path / "data"
    data.mkdir()
    for file in tiny_data.iterdir():
        (data / file.name).write_bytes(file.read_bytes())
    (data / "sentencepiece.model").write_bytes(b"stands for a tokenizer")
    save_dir = tmp_path / "save"
    trained = run_python(
        *("-m", "smlp", "train", data, "--arch", "smlp_tiny", *SMALL),
        *("--max-update", "3", "--batch-size", "8", "--save-dir", save_dir, "--log-format", "simple"),
    )
    assert trained.rc == 0, trained.stderr
    # not one warning: here even those of fairseq's own import are spared
    added = "--task language_modeling --optimizer adam --lr 5e-4"
    assert trained.stderr.splitlines() == [f"smlp train: using {added}"]
    assert "| INFO | valid |" in trained.stdout
    for name in ("dict.txt", "sentencepiece.model"):
        assert (save_dir / name).read_bytes() == (data / name).read_bytes()

    for folder in (data, save_dir):
        (folder / "sentencepiece.model").unlink()
    path = save_dir / "checkpoint_last.pt"
    assert main.main(["eval-lm", str(data), "--path", str(path), "--gen-subset", "valid"]) == 0
    validated = trained.stdout.rpartition("valid on 'valid' subset")[2].split("| ppl ")[1].split()[0]
    perplexity = float(re.search(r"Perplexity: ([\d.]+)", capsys.readouterr().out)[1])
    assert perplexity == pytest.approx(float(validated), abs=0.011)


def test_stock_fairseq_finds_the_architectures(tiny_data: Path, tmp_path: Path, run_fairseq_many) -> None:
    arguments = [tiny_data, "--user-dir", USER_DIR, "--task", "language_modeling", "--arch", "smlp_tiny"]
    rest = ["--optimizer", "adam", "--lr", "1e-3", "--batch-size", "8", "--max-update", "1", "--save-dir", tmp_path]
    (run,) = run_fairseq_many([{"tool": "train", "args": [*arguments, *SMALL, *rest]}])
    assert run.rc == 0, run.stderr
    assert run.errors == []
    assert torch.load(tmp_path / "checkpoint_last.pt")["cfg"]["model"]["_name"] == "smlp_tiny"


def test_a_refused_model_leaves_no_save_dir(tiny_data: Path, tmp_path: Path, capsys) -> None:
    save_dir = tmp_path / "save"
    assert main.main(["train", str(tiny_data), "--embed-dim", "7", "--cpu", "--save-dir", str(save_dir)]) == 1
    assert "must divide embed_dim=7" in capsys.readouterr().err
    assert not save_dir.exists()
    save_dir.mkdir()
    (save_dir / "notes").touch()
    assert main.main(["train", str(tiny_data), "--embed-dim", "7", "--cpu", "--save-dir", str(save_dir)]) == 1
    assert [path.name for path in save_dir.iterdir()] == ["notes"]


def test_a_save_dir_keeps_its_dictionary(tiny_data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "dict.txt").write_text("one 1\ntwo 2\n")
    (other / "sentencepiece.model").write_text("trained")
    copied = [tmp_path / "dict.txt", tmp_path / "sentencepiece.model"]
    assert train.copy_companions(other, tmp_path) == copied and train.copy_companions(other, tmp_path) == []
    copied[1].write_text("of the user")
    with pytest.raises(UserError, match=r"has another sentencepiece\.model than"):
        train.copy_companions(other, tmp_path)
    assert copied[1].read_text() == "of the user"
    (tmp_path / "checkpoint_last.pt").touch()
    copied[1].write_text("trained")
    (other / "dict.txt").write_text("one 8\ntwo 7 \n")  # the same symbols
    assert train.copy_companions(other, tmp_path) == [] and copied[0].read_text() == "one 1\ntwo 2\n"
    with pytest.raises(UserError, match=r"another dictionary \(2 symbols\)"):
        train.copy_companions(tiny_data, tmp_path)
    assert (tmp_path / "dict.txt").read_text() == "one 1\ntwo 2\n"


@pytest.mark.parametrize("task", ["squad", "language_modeling"])
def test_no_dictionary_is_copied_next_to_a_checkpoint_of_another(task: str, tmp_path: Path, monkeypatch) -> None:
    from smlp.fairseq_compat import data, loading

    def refuse(*arguments: object) -> None:
        raise UserError("trained with another")

    monkeypatch.setattr(loading, "check_dictionary_of", refuse)
    monkeypatch.setattr(data, "check_split", lambda *arguments: None)
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "checkpoint_last.pt").touch()
    (tmp_path / "dict.txt").write_text("one 1\n")
    cfg = SimpleNamespace(
        task=SimpleNamespace(_name=task, data=str(tmp_path)),
        model=None,
        dataset=SimpleNamespace(train_subset="train"),
        distributed_training=SimpleNamespace(distributed_rank=0),
        checkpoint=SimpleNamespace(no_save=False, save_dir=str(tmp_path / "save")),
    )
    with pytest.raises(UserError, match="trained with another"):
        train.prepare(cfg)
    assert not (tmp_path / "save" / "dict.txt").exists()


def test_a_spawned_process_registers_the_plugin() -> None:
    """fairseq spawns one process for each GPU and sends it the main function; unpickling it imports this package, after
    which fairseq does not scan it any more."""
    sent = pickle.dumps(command_line._main_with_plugin)
    script = f"""
import pickle
main_with_plugin = pickle.loads({sent!r})
def tool(cfg):
    from fairseq.models import ARCH_MODEL_REGISTRY
    assert "smlp_tiny" in ARCH_MODEL_REGISTRY
    return cfg
assert main_with_plugin(tool, "its configuration") == "its configuration"
"""
    run = run_python("-c", script)
    assert run.rc == 0, run.stderr


def test_doctor_reports_and_writes_json(tmp_path: Path, capsys) -> None:
    report = tmp_path / "doctor.json"
    status = main.main(["doctor", "--json", str(report)])
    shown = capsys.readouterr().out
    written = json.loads(report.read_text())
    assert status == 0, shown
    assert written["ok"] is True
    checks = {check["name"]: check for check in written["checks"]}
    for name in ("python", "torch", "fairseq", "devices", "threads", "fp32 speed", "bf16 speed", "plug-in", "disk"):
        assert checks[name]["status"] in ("ok", "warning")
        assert f"{name}: {checks[name]['detail']}" in shown
    assert "smlp_tiny" in checks["plug-in"]["detail"]
    assert "harmless" in checks["fairseq.libbase"]["detail"] or checks["fairseq.libbase"]["detail"] == "loads"
    assert float(re.match(r"([\d,.]+) GFLOP/s", checks["fp32 speed"]["detail"]).group(1).replace(",", "")) > 0.1


def test_doctor_names_a_broken_plug_in(monkeypatch) -> None:
    def load() -> None:
        raise UserError("SMLP_PLUGINS: mine.py cannot be loaded")

    monkeypatch.setattr("smlp.fairseq_compat.command_line.load_plugin", load)
    (check,) = doctor.check_plugin()
    assert (check.status, check.detail) == (doctor.PROBLEM, "SMLP_PLUGINS: mine.py cannot be loaded")
    assert check.remedy == "mend that file, or leave it out of SMLP_PLUGINS"


@pytest.mark.parametrize(
    ("version", "oldest", "newest", "status"),
    [
        (None, "1", "2", doctor.PROBLEM),
        ("2.5.1", "2.6", "2.13", doctor.PROBLEM),
        ("2.6.0", "2.6", "2.13", doctor.OK),
        ("2.13.1+cpu", "2.6", "2.13", doctor.OK),
        ("2.14.0", "2.6", "2.13", doctor.WARNING),
        ("1.3.1", "1.3.2", "1.3.2", doctor.PROBLEM),
        ("1.3.2", "1.3.2", "1.3.2", doctor.OK),
    ],
)
def test_doctor_compares_versions(version: str | None, oldest: str, newest: str, status: str) -> None:
    check = doctor.compare_version("torch", version, oldest, newest, remedy="do this")
    assert check.status == status
    assert bool(check.remedy) == (status != doctor.OK)


@pytest.mark.parametrize(
    ("installed", "status"),
    [
        ({"ve-fairseq": "0.12.3"}, doctor.OK),
        ({"fairseq-fixed": "0.12.3.1"}, doctor.OK),
        ({"ve-fairseq": "0.12.3", "fairseq-fixed": "0.12.3.1"}, doctor.PROBLEM),
        ({"ve-fairseq": "0.12.3", "fairseq": "0.12.2"}, doctor.PROBLEM),
        ({"fairseq": "0.12.2"}, doctor.PROBLEM),
        ({}, doctor.PROBLEM),
    ],
)
def test_doctor_knows_the_fairseqs(installed: dict[str, str], status: str, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "_installed", installed.get)
    check = doctor.check_fairseq_version()
    assert check.status == status and check.remedy.endswith("then install ve-fairseq again") == (len(installed) > 1)


def test_doctor_reports_problems(monkeypatch, capsys) -> None:
    def check_something():
        raise ImportError("no such library")
        yield

    monkeypatch.setattr(
        doctor, "machine_checks", lambda: doctor._guarded(check_something, "it does not work", "install it")
    )
    assert doctor.run(argparse.Namespace(json=None, parallel=False, nproc=None, dir=None)) == 1
    shown = capsys.readouterr().out
    assert "problem  something: it does not work: ImportError: no such library" in shown
    assert "-> install it" in shown


@pytest.mark.slow
def test_a_variable_that_torch_refuses(tmp_path: Path) -> None:
    """A second import of torch would end the process without a word."""
    environment = {**os.environ, "TORCH_LOGS": "nonsense"}
    said = []
    for words in (["doctor"], ["flops", "--arch", "smlp_tiny"]):
        command = [sys.executable, "-m", "smlp", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        said.append(done.stdout + done.stderr)
    reason = "torch cannot be imported with TORCH_LOGS in the environment: Invalid log settings: nonsense, must be"
    assert f"problem  torch import: {reason}" in said[0] and "-> unset TORCH_LOGS\n" in said[0]
    assert said[1].startswith(f"smlp: error: {reason}") and said[1].count("\n") == 1


def test_slow_bf16_is_a_warning_with_a_remedy(monkeypatch) -> None:
    rates = {torch.float32: 100e9, torch.bfloat16: 1e9}
    monkeypatch.setattr("smlp.costs.matmul_rate.matmul_rate", lambda device, dtype: rates[dtype])
    fp32, bf16 = doctor.check_speed()
    assert (fp32.status, bf16.status) == (doctor.OK, doctor.WARNING)
    assert "100 times slower" in bf16.detail
    assert "--bf16" in bf16.remedy
