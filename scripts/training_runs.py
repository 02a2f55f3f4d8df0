"""Run the steps that scripts which train models share: fairseq-train and fairseq-eval-lm, each with a log."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TextIO

from training_display import TrainingDisplay

from smlp.errors import UserError
from smlp.evaluation.perplexity import Perplexity, TextSize
from smlp.files import write_whole
from smlp.launch.local import end_with_parent, failed_step, run_logged

ROOT = Path(__file__).resolve().parent.parent
TOKENS_PER_SAMPLE = 128
BATCH_SIZE = 8
TOKENS_PER_UPDATE = TOKENS_PER_SAMPLE * BATCH_SIZE
LOG_INTERVAL = 10  # updates
WARMUP_UPDATES = 50
RECIPE = shlex.split(
    "--optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.1 --clip-norm 1.0 --lr 5e-3 --lr-scheduler cosine "
    f"--warmup-updates {WARMUP_UPDATES} --warmup-init-lr 1e-7 --dropout 0 --seed 1 --no-epoch-checkpoints "
    f"--keep-interval-updates 1 --log-format json --log-interval {LOG_INTERVAL}"
)


def executable(name: str) -> str:
    """Return the path of a command in this Python's environment, such as fairseq-train."""
    return str(Path(sys.executable).parent / name)


def settle(out: Path, settings: dict, is_fresh: bool) -> None:
    """Record what a run folder is made with, and refuse one that was made with other settings, whose parts would be
    mixed up with new ones; ``is_fresh`` if it holds no parts yet."""
    path = out / "settings.json"
    made_with = None
    if path.is_file():
        with contextlib.suppress(ValueError):
            made_with = json.loads(path.read_text(errors="replace"))
        budget = {"updates", "minutes"}  # one of the two
        if not isinstance(made_with, dict) or made_with.keys() - budget != settings.keys() - budget:
            raise UserError(f"{path} is of something else: choose another folder with --out")
    if is_fresh or made_with is None:
        write_whole(path, json.dumps(settings, indent=2).encode())
        return
    if made_with != settings:
        names = [name for name in {**made_with, **settings} if settings.get(name) != made_with.get(name)]
        raise UserError(
            f"{out} was made with another {', '.join(names)} (see {path}): choose another folder with --out"
        )


def train(arch: str, data: Path, run: Path, num_updates: int, validations: int, log: Path, more: list[str]) -> bool:
    """Run fairseq-train with a live display and its whole output in ``log``; return False if it was done before.

    ``more`` are further options. A run that was stopped resumes from its last checkpoint.
    """
    if (run / "done").is_file():
        return False
    interval = max(num_updates // validations, 1)
    command = [executable("fairseq-train"), str(data), "--user-dir", "smlp", "--task", "language_modeling"]
    command += ["--arch", arch, "--tokens-per-sample", str(TOKENS_PER_SAMPLE), "--batch-size", str(BATCH_SIZE)]
    command += ["--batch-size-valid", "32", "--max-update", str(num_updates), *RECIPE, *more]
    command += ["--validate-interval-updates", str(interval), "--save-interval-updates", str(interval)]
    command += ["--save-dir", str(run), "--log-file", str(run / "train.log")]
    run.mkdir(parents=True, exist_ok=True)
    (run / "command.txt").write_text(shlex.join(command) + "\n")
    with log.open("w") as output:
        status = _watch(command, TrainingDisplay(arch, num_updates), output)
    if status != 0:
        raise failed_step(f"train {arch}", status, log)
    (run / "done").touch()
    return True


def _watch(command: list[str], display: TrainingDisplay, output: TextIO) -> int:
    """Run a command, show and record what it prints, and return its exit status; it does not outlive this process."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=ROOT, text=True, preexec_fn=end_with_parent(), **streams)
    try:
        for line in process.stdout:
            output.write(line)
            display.feed(line)
        process.wait()
    finally:
        if process.returncode is None:  # interrupted
            process.terminate()
            process.wait()
        display.close()
    return process.returncode


def eval_lm(name: str, data: Path, run: Path, log: Path, size: TextSize) -> Perplexity:
    """Run fairseq-eval-lm on the validation text, of this size, with the best checkpoint."""
    command = [executable("fairseq-eval-lm"), str(data), "--user-dir", "smlp", "--gen-subset", "valid"]
    command += ["--path", str(run / "checkpoint_best.pt"), "--batch-size", "32"]
    command += ["--tokens-per-sample", str(TOKENS_PER_SAMPLE)]
    text = run_logged(f"eval {name}", command, log, ROOT)
    bits = re.search(r"Loss \(base 2\): ([\d.]+)", text)
    tokens = re.search(r"Evaluated ([\d,]+) tokens", text)
    if not bits or not tokens:
        raise UserError(f"step 'eval {name}' printed no result, see {log}")
    num_tokens = int(tokens.group(1).replace(",", ""))
    return Perplexity(float(bits.group(1)) * math.log(2) * num_tokens, num_tokens, size)
