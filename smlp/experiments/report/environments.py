"""Where and with what the runs were trained: the machine, and in what they differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from smlp.experiments.report.runs import Experiment

#: what may change a run's numbers, or their speed
_NAMES = ("smlp", "torch", "fairseq", "numpy", "python", "processor", "gpu", "threads", "world_size", "git", "plugins")


def hardware(experiment: Experiment) -> dict[str, Any]:
    """Names and values of environment.json, those of the first run's own record before others; ``gpus`` is a list."""
    own = next((run.environments[-1] for run in experiment.runs if run.environments), None)
    if own is None:
        return dict(experiment.environment)
    return {**experiment.environment, **own, "gpus": [own["gpu"]] * own["world_size"] if own.get("gpu") else []}


def gpus(experiment: Experiment) -> str:
    """Such as ``2 GPUs (NVIDIA H200)``, or ``no GPU``."""
    found = hardware(experiment).get("gpus") or []
    return f"{_counted(len(found), 'GPU')} ({', '.join(dict.fromkeys(found))})" if found else "no GPU"


def machine(experiment: Experiment) -> str:
    """A sentence; empty where no file says."""
    found = hardware(experiment)
    if not found:
        return ""
    parts = [gpus(experiment), f"{found.get('cores')} cores"]
    if found.get("processor"):
        parts.append(found["processor"])
    return (
        f"Machine: {', '.join(parts)}; at a time {_counted(found.get('jobs'), 'run')}, each with "
        f"{_counted(found.get('world_size'), 'rank')} of {_counted(found.get('threads'), 'thread')}."
    )


def differences(experiment: Experiment) -> list[str]:
    """A sentence for each thing that was not the same at all starts of the finished runs."""
    sentences = []
    for name in _NAMES:
        runs: dict[str, list[str]] = {}
        for run in experiment.runs:
            for record in run.environments if run.is_done else ():
                names = runs.setdefault(_shown(record.get(name)), [])
                if run.name not in names:
                    names.append(run.name)
        if len(runs) > 1:
            parts = "; ".join(f"{value} ({', '.join(names)})" for value, names in runs.items())
            sentences.append(f"Runs were not made with the same {name}: {parts}")
    return sentences


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) and "revision" in value:
        changed = value.get("changed")
        return f"{value['revision']}{', changed: ' + value.get('difference_sha256', '')[:12] if changed else ''}"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _counted(count: int | None, noun: str) -> str:
    return f"{'an unknown number of' if count is None else count} {noun}{'s' * (count != 1)}"
