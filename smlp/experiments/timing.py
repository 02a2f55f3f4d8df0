"""Starts the timing of updates (:mod:`smlp.experiments.speed`) when the runs of this machine have ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from smlp.experiments.experiment import Experiment
from smlp.experiments.folder import DONE, Folder, read_json
from smlp.experiments.local import Machine
from smlp.experiments.plan import Run
from smlp.experiments.processes import Chain, Ended, Step, run_chains
from smlp.launch.program import this_module


class _Timing(Chain):
    """One command, of which nothing else depends."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self._steps = [Step("speed", command, log, environment)]

    def next_step(self, slot: int) -> Step | None:
        return self._steps.pop() if self._steps else None

    def ended(self, result: Ended) -> None:
        if result.status != 0 and not result.is_stopping:
            print(f"smlp: warning: no speed.json: status {result.status}, see {result.step.output}", flush=True)


def time_here(experiment: Experiment, folder: Folder, runs: Sequence[Run], machine: Machine) -> signal.Signals | None:
    """Time of an update, models in turn, if a model has none; a failure costs this figure and nothing else.

    Returns:
        The signal that stopped it, or None.
    """
    rounds = experiment.evaluation.speed_rounds
    timed = read_json(folder.speed, {"models": dict})["models"] if folder.speed.is_file() else {}
    if not rounds:
        return None
    trained = [run for run in runs if folder.run(run.folder).state()["state"] == DONE]
    if all(run.model.name in timed for run in trained):
        return None
    print(f"time of an update, {rounds} rounds, models in turn", flush=True)
    log = folder.path / "logs" / "speed.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [*this_module("smlp.experiments.speed"), str(folder.path), str(rounds)]
    threads = machine.threads * experiment.place.at_a_time(len(runs))  # nothing else is running
    environment = {**machine.environment(0), "OMP_NUM_THREADS": str(threads)}
    return run_chains([_Timing(command, log, environment)], 1, lambda: None)
