"""Find what a process may use of this machine, and how its threads wait for each other. Loading it imports no torch."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: iterations that a thread of torch's OpenMP spins before it sleeps, on a machine with other busy programs. libgomp's
#: default of 300,000 occupies a core for milliseconds, even if the awaited thread needs that core; on an idle machine
#: it is faster (docs/performance.md has figures).
SPIN_COUNT = 1000
#: environment variables that control how threads wait
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_CGROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_LOAD = Path("/proc/loadavg")
_SAMPLES, _SAMPLE_SECONDS = 5, 0.01
#: operators without which the import of torchvision fails
_TORCHVISION_OPERATORS = ("nms", "qnms")


def num_cores() -> int:
    """Return the number of cores that this process may keep busy: its affinity, and the CPU quota of its cgroups."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, int(cpu_quota())))


def cpu_quota(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> float:
    """Return how many cores' worth of time the cgroups of this process grant it; a huge number without a limit.

    Args:
        cgroups: where the cgroup file systems (version 1 or 2) are mounted.
        membership: the file that names the cgroups of a process.
    """
    try:
        lines = os.fsdecode(membership.read_bytes()).split("\n")
    except OSError:  # not Linux
        return float(2**31)
    quota = float(2**31)
    for _, controllers, name in (parts for line in lines if len(parts := line.split(":", 2)) == 3):
        if controllers == "" or "cpu" in controllers.split(","):
            root = cgroups if controllers == "" else cgroups / "cpu"
            for folder in _with_parents(root, name):
                with suppress(OSError, ValueError):
                    granted, period = _granted(folder)
                    if granted > 0 and period > 0:
                        quota = min(quota, granted / period)
    return quota


def _with_parents(root: Path, name: str) -> Iterator[Path]:
    """Yield a cgroup's folder and its parents. In a container the name may be one that only the host knows."""
    folder = root / name.lstrip("/")
    while folder != root:
        yield folder
        folder = folder.parent
    yield root


def _granted(folder: Path) -> tuple[int, int]:
    """Return the microseconds of CPU time in each period, and the period; raise ``ValueError`` without a limit."""
    if (folder / "cpu.max").is_file():
        granted, period = (folder / "cpu.max").read_text().split()
        return int(granted), int(period)
    quota, period = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
    return int(quota.read_text()), int(period.read_text())


def memory_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def others_running(load: Path = _LOAD) -> int:
    """Return how many other threads want a core, the minimum of a few samples; 0 if that is unknown."""
    fewest = 2**31
    for _ in range(_SAMPLES):
        try:
            running = int(load.read_text().split()[3].partition("/")[0])
        except (OSError, ValueError, IndexError):  # not Linux
            return 0
        fewest = min(fewest, running - 1)
        if fewest <= 0:
            return 0
        time.sleep(_SAMPLE_SECONDS)
    return fewest


def let_waiting_threads_sleep() -> None:
    """Make threads sleep soon when they wait for each other, if other programs keep the cores busy.

    This holds for this process and those that it starts. The libraries read the environment when they are loaded, so
    call this before torch is imported. What the user's environment says about waiting is kept.
    """
    if any(name in os.environ for name in _WAITING):
        return
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdecimal() and len(given) < 10 else num_cores()
    if threads > 1 and others_running() + threads > (os.cpu_count() or 1):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def let_torchvision_load() -> None:
    """Let torchvision be imported although its compiled operators do not fit the installed torch.

    PyPI's torchvision is built for CUDA. With torch's CPU build its library does not load, and ``import torchvision``
    ends with "operator torchvision::nms does not exist". Once the operators are declared, the import works; they fail
    only when they are called. timm needs torchvision; torchmetrics imports it if it is installed: call this first.
    """
    found = None if "torchvision" in sys.modules else importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    import torch

    with suppress(OSError):
        torch.ops.load_library(str(Path(found.origin).parent / "_C.so"))
    for name in _TORCHVISION_OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
