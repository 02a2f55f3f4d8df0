"""Repeat measurements while another program keeps one core busy, as on shared machines or with two runs at a time."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from benchmarks import assignment, decoding, spatial
from benchmarks.report import Row, compared
from benchmarks.settings import VOCABULARY, Settings, matched
from benchmarks.timing import interleaved
from benchmarks.updates import build, update
from smlp.launch.local import end_with_parent

SECTION = "Next to a program that keeps one core busy"
#: how much longer an update may take than on an idle machine
SLOWER = 2.2


def rows(settings: Settings) -> Iterator[Row]:
    """Compare fast paths with the obvious ones, which must not win here either, and updates with an idle machine's."""
    if settings.device != "cpu":
        return
    with _neighbour() as (resume, pause):
        resume()
        short = replace(settings, quick=True)
        for part in (spatial, assignment, decoding):
            yield from (replace(row, section=SECTION, target=1.0) for row in part.rows(short) if row.unit)
        matches = matched(settings, ["smlp", "gmlp_lm"])
        for arch, found in matches.items():
            tokens_Bn = torch.randint(4, settings.sized(VOCABULARY)[0], (1, found.config.max_tokens))
            step = update(build(found.config, settings), tokens_Bn)
            variants = {"busy": _after(resume, step), "idle": _after(pause, step)}
            seconds = interleaved(variants, min(settings.repeats, 5), settings.device)
            what = f"update of {arch}, 1 x {found.config.max_tokens} tokens"
            yield compared(SECTION, what, seconds["busy"], "idle", seconds["idle"], 1 / SLOWER)


def _after(first: Callable[[], None], step: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        first()
        step()

    return run


@contextmanager
def _neighbour() -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Start a process that computes for ever; yield a function that lets it run and one that pauses it."""
    command = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(command, preexec_fn=end_with_parent()) as process:
        try:
            yield partial(process.send_signal, signal.SIGCONT), partial(process.send_signal, signal.SIGSTOP)
        finally:
            process.kill()
