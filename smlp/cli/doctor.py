"""``smlp doctor``: what works on this machine, what does not, and what to do about it."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from smlp.cli.check_report import OK, PROBLEM, WARNING, Check, report
from smlp.cli.numbers import MOST_PROCESSES, whole
from smlp.errors import UserError
from smlp.launch.machine import num_cores

# Package: (oldest version that can work, newest one the tests ran with). The same twice: exactly this one.
TESTED = {
    "torch": ("2.6", "2.13"),
    "numpy": ("1.26", "2.4"),
    "hydra-core": ("1.3.2", "1.3.2"),
    "omegaconf": ("2.3.0", "2.3.0"),
    "fairscale": ("0.4.13", "0.4"),
    "sentencepiece": ("0.2", "0.2"),
    "fvcore": ("0.1.5", "0.1.5"),
}
PYTHON = ("3.11", "3.12")
# Both re-releases of fairseq 0.12 import as `fairseq`; the original does not import on these Pythons.
FAIRSEQ = ("ve-fairseq", "fairseq-fixed")
INSTALL = "pip install -e . in the repository installs the pinned versions"

LITTLE_DISK = 2 << 30  # bytes; three copies of a small model with its optimiser state
SLOW_BF16 = 2.0  # times slower than fp32 from which on bf16 is not worth its name


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "doctor",
        help="what works here and what does not",
        description="Checks versions, devices, speed, fairseq and this plug-in; with --parallel whether several ranks "
        "work together: collectives, experts spread over ranks against one process, a checkpoint's way to the disk and "
        "back. Exit status 1 if there is a problem.",
        epilog="examples:\n"
        "  smlp doctor --json doctor.json\n"
        "  smlp doctor --parallel --nproc 2\n"
        "  srun --ntasks-per-node=8 smlp doctor --parallel --dir /shared/scratch",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="also write the report to a file")
    parser.add_argument("--parallel", action="store_true", help="check the ranks that torchrun, srun or --nproc start")
    parser.add_argument(
        "--nproc",
        **whole(1, MOST_PROCESSES),
        metavar="N",
        help="with --parallel: ranks on this machine (default: one for each GPU, or 2)",
    )
    parser.add_argument(
        "--dir", default=".", metavar="DIR", help="with --parallel: a folder that all ranks share (default: this one)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    if args.parallel:
        from smlp.cli import parallel_check

        return parallel_check.run(args)
    if args.nproc is not None:
        raise UserError("--nproc is for smlp doctor --parallel")
    return report(all_checks(), args.json)


def all_checks() -> Iterator[Check]:
    """Every check, in an order in which later ones may need what earlier ones found."""
    yield compare_version("python", platform.python_version(), *PYTHON, remedy="use Python 3.11 or 3.12")
    yield check_fairseq_version()
    for package, (oldest, newest) in TESTED.items():
        yield compare_version(package, _installed(package), oldest, newest, remedy=INSTALL)
    for check in (check_devices, check_threads, check_speed):
        yield from _guarded(check, "torch does not work", INSTALL)
    for check in (check_fairseq, check_plugin, check_compiled):
        yield from _guarded(check, "fairseq does not work", INSTALL)
    yield check_disk()


def _guarded(check: Callable[[], Iterator[Check]], meaning: str, remedy: str) -> Iterator[Check]:
    """The results of a check; whatever goes wrong inside it is a problem to report, not a reason to stop."""
    try:
        yield from check()
    except Exception as error:
        name = check.__name__.removeprefix("check_")
        yield Check(name, PROBLEM, f"{meaning}: {type(error).__name__}: {error}", remedy)


def compare_version(name: str, version: str | None, oldest: str, newest: str, remedy: str) -> Check:
    """A problem below ``oldest``, a warning above ``newest`` (compared to as many places as they have)."""
    if version is None:
        return Check(name, PROBLEM, "is not installed", remedy)
    tested = oldest if oldest == newest else f"{oldest} to {newest}"
    if _numbers(version) < _numbers(oldest):
        return Check(name, PROBLEM, f"{version}, but {tested} is needed", remedy)
    if _numbers(version)[: len(_numbers(newest))] > _numbers(newest):
        return Check(name, WARNING, f"{version} is newer than what was tested ({tested})", remedy)
    return Check(name, OK, version)


def check_fairseq_version() -> Check:
    found = {name: _installed(name) for name in (*FAIRSEQ, "fairseq")}
    found = {name: version for name, version in found.items() if version}
    detail = " and ".join(f"{name} {version}" for name, version in found.items()) or "is not installed"
    if len(found) != 1:
        remedy = f"pip uninstall {' '.join(found)}, then install one of them again" if found else INSTALL
        return Check("fairseq", PROBLEM, detail, remedy)
    if "fairseq" in found:
        return Check("fairseq", PROBLEM, f"{detail} does not run on Python 3.11 or newer", INSTALL)
    (version,) = found.values()
    if _numbers(version)[:3] != (0, 12, 3):
        return Check("fairseq", WARNING, f"{detail}, but 0.12.3 is what was tested", INSTALL)
    return Check("fairseq", OK, detail)


def check_devices() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        yield Check("devices", OK, f"CPU only (torch {torch.__version__}): tiny models train, large ones need a GPU")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Check("devices", OK, f"GPU {index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB")


def check_threads() -> Iterator[Check]:
    import torch

    cores, threads = num_cores(), torch.get_num_threads()
    detail = f"{cores} cores for this process, {threads} threads in torch"
    if threads > cores:
        yield Check("threads", WARNING, detail, f"set OMP_NUM_THREADS={cores}: threads beyond the cores only wait")
    else:
        yield Check("threads", OK, detail)


def check_speed() -> Iterator[Check]:
    import torch

    from smlp.costs.matmul_rate import matmul_rate

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fp32, bf16 = (matmul_rate(device, dtype) for dtype in (torch.float32, torch.bfloat16))
    yield Check("fp32 speed", OK, f"{fp32 / 1e9:,.1f} GFLOP/s in matrix products ({device.type})")
    detail = f"{bf16 / 1e9:,.1f} GFLOP/s in matrix products ({device.type})"
    if fp32 > SLOW_BF16 * bf16:
        detail += f", {fp32 / bf16:.0f} times slower than fp32: this {device.type.upper()} has no fast bf16"
        yield Check("bf16 speed", WARNING, detail, "train without --bf16 here")
    else:
        yield Check("bf16 speed", OK, detail)


def check_fairseq() -> Iterator[Check]:
    from smlp.fairseq_compat.logs import quiet_known_warnings

    quiet_known_warnings()
    start = time.perf_counter()
    fairseq = importlib.import_module("fairseq")
    seconds = time.perf_counter() - start
    yield Check("fairseq import", OK, f"{Path(fairseq.__file__).parent}, {seconds:.1f} s")


def check_plugin() -> Iterator[Check]:
    from fairseq.models import ARCH_MODEL_REGISTRY

    from smlp.cli.fairseq_tool import load_plugin
    from smlp.config.presets import PRESETS

    load_plugin()
    missing = [arch for arch in PRESETS if arch not in ARCH_MODEL_REGISTRY]
    if missing:
        yield Check("plug-in", PROBLEM, f"fairseq does not know {', '.join(missing)}", INSTALL)
    else:
        yield Check("plug-in", OK, f"registers {', '.join(PRESETS)}")


def check_compiled() -> Iterator[Check]:
    for module in ("fairseq.data.data_utils_fast", "fairseq.data.token_block_utils_fast"):
        try:
            importlib.import_module(module)
            yield Check(module, OK, "loads")
        except ImportError as error:
            yield Check(module, PROBLEM, f"does not load, and batching needs it: {error}", INSTALL)
    try:
        importlib.import_module("fairseq.libbase")
        yield Check("fairseq.libbase", OK, "loads")
    except ImportError:
        detail = "does not load with this torch; harmless, the balanced assignment here is smlp's own"
        yield Check("fairseq.libbase", OK, detail)


def check_disk() -> Check:
    free = shutil.disk_usage(".").free
    detail = f"{free / 2**30:.1f} GiB free in {os.getcwd()}"
    if free < LITTLE_DISK:
        return Check("disk", WARNING, detail, "put --save-dir on another disk, or keep fewer: --no-epoch-checkpoints")
    return Check("disk", OK, detail)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` as (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))
