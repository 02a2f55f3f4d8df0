"""Time from the command to the end of the first update of a tiny model."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import peers
from benchmarks.report import Row
from benchmarks.settings import Settings

SECTION = "Start-up"
SECONDS = 8.0


def rows(settings: Settings) -> Iterator[Row]:
    """Yield the time of the fastest of several runs of ``smlp train``; on a GPU it includes the device's own start."""
    if peers.module("fairseq_cli.preprocess", "fairseq") is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        data = _binarised(Path(folder))
        seconds = min(
            _first_update(data, settings) for _ in range(1 if settings.scale > 1 else 2 if settings.quick else 5)
        )
    what = "smlp train --arch smlp_tiny, the first update and the end"
    yield Row(SECTION, what, seconds, "the target", SECONDS, "s", SECONDS / seconds, 1.0)


def _binarised(folder: Path) -> Path:
    """Write a few sentences as fairseq's preprocess leaves them; return the folder."""
    from fairseq import options
    from fairseq_cli import preprocess

    draw = random.Random(0)
    words = [f"word{number}" for number in range(50)]
    text = folder / "train.txt"
    text.write_text("".join(" ".join(draw.choices(words, k=20)) + "\n" for _ in range(400)))
    arguments = ["--only-source", "--trainpref", str(text), "--destdir", str(folder / "data"), "--workers", "1"]
    preprocess.main(options.get_preprocessing_parser().parse_args(arguments))
    return folder / "data"


def _first_update(data: Path, settings: Settings) -> float:
    command = [sys.executable, "-m", "smlp", "train", str(data), "--arch", "smlp_tiny", "--max-update", "1"]
    command += ["--task", "language_modeling", "--tokens-per-sample", "128", "--batch-size", "8", "--no-save"]
    command += ["--optimizer", "adam", "--lr", "1e-3", "--disable-validation", "--num-workers", "0"]
    if settings.device == "cpu":
        command.append("--cpu")
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"smlp train ended with {done.returncode}: {done.stderr[-300:]}")
    return time.perf_counter() - start
