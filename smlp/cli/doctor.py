"""``smlp doctor``: what works on this machine, what does not, and what to do about it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from smlp.cli.interrupts import leave_if_interrupted
from smlp.cli.json_file import check_outputs, write_json
from smlp.cli.numbers import MOST_PROCESSES, whole
from smlp.errors import UserError, refused_variables, torch_refuses
from smlp.launch.machine import num_cores
from smlp.launch.ranks import check_local_rank

DESCRIPTION = (
    "Checks versions, devices, speed, fairseq and this plug-in. With --parallel, checks whether several ranks work "
    "together: collectives, experts spread over ranks compared with one process, writing and reading a checkpoint. "
    "Exit status 1 if there is a problem."
)
EPILOG = """examples:
  smlp doctor --json doctor.json
  smlp doctor --parallel --nproc 2
  srun --ntasks-per-node=8 smlp doctor --parallel --dir /shared/scratch"""
OK, WARNING, PROBLEM = "ok", "warning", "problem"
# package: (oldest version that works, newest tested version)
TESTED = {
    "torch": ("2.6", "2.13"),
    "numpy": ("1.26", "2.4"),
    "hydra-core": ("1.3.2", "1.3.2"),
    "omegaconf": ("2.3.0", "2.3.0"),
    "fairscale": ("0.4.13", "0.4.13"),
    "sentencepiece": ("0.2", "0.2"),
    "fvcore": ("0.1.5", "0.1.5"),
}
PYTHON = ("3.11", "3.12")
# Both re-releases of fairseq 0.12 are imported as `fairseq`; the original fails on these Python versions.
FAIRSEQ = ("ve-fairseq", "fairseq-fixed")
INSTALL = "pip install -e . in the repository, or pip install of the wheel, installs the pinned versions"

LITTLE_DISK = 2 << 30  # bytes: three copies of a small model with its optimizer's state
SLOW_BF16 = 2.0  # bf16 counts as unsupported by the hardware if it is this many times slower than fp32
#: timeout of a collective, after which a rank is considered lost
TIMEOUT = timedelta(seconds=60)
_ASK_THE_OTHERS = "read the messages of the other ranks; docs/parallel.md explains each check"


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the report; ``remedy`` is empty if there is nothing to do."""

    name: str
    status: str
    detail: str
    remedy: str = ""


def report(checks: Iterable[Check], json_file: str | None) -> int:
    """Print each check as it is done, and a summary; return the exit status, 1 if there is a problem."""
    done = []
    for check in checks:
        leave_if_interrupted()
        done.append(check)
        print(f"{check.status:>7}  {check.name}: {check.detail}", flush=True)
        if check.remedy:
            print(f"{'':>7}  -> {check.remedy}", flush=True)
    problems = sum(check.status == PROBLEM for check in done)
    warnings = sum(check.status == WARNING for check in done)
    counted = {"check": len(done), "warning": warnings, "problem": problems}
    print(", ".join(f"{number} {what}{'s' * (number != 1)}" for what, number in counted.items()), flush=True)
    write_json(json_file, {"ok": problems == 0, "checks": [dataclasses.asdict(check) for check in done]})
    return 1 if problems else 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", metavar="FILE", help="also write the report to a file")
    parser.add_argument("--parallel", action="store_true", help="check the ranks that torchrun, srun or --nproc start")
    parser.add_argument(
        "--nproc",
        **whole(1, MOST_PROCESSES),
        metavar="N",
        help="with --parallel: ranks on this machine (default: one for each GPU, or 2)",
    )
    parser.add_argument(
        "--dir", metavar="DIR", help="with --parallel: a folder that all ranks share (default: this one)"
    )


def run(args: argparse.Namespace) -> int:
    check_outputs(json=args.json)
    if args.parallel:
        return check_ranks(args)
    for option, value in (("--nproc", args.nproc), ("--dir", args.dir)):
        if value is not None:
            raise UserError(f"{option} is for smlp doctor --parallel")
    return report(machine_checks(), args.json)


def machine_checks() -> Iterator[Check]:
    """Run every check; later ones may need what earlier ones found."""
    yield compare_version("python", platform.python_version(), *PYTHON, remedy="use Python 3.11 or 3.12")
    yield check_fairseq_version()
    for package, (oldest, newest) in TESTED.items():
        yield compare_version(package, _installed(package), oldest, newest, remedy=INSTALL)
    try:
        importlib.import_module("torch")
    except Exception as error:  # a second import of it could end this process
        names = " and ".join(refused_variables(error))
        remedy = f"unset {names}" if names else INSTALL
        yield Check("torch import", PROBLEM, torch_refuses(error) or f"{type(error).__name__}: {error}", remedy)
        yield check_disk()
        return
    for check in (check_devices, check_threads, check_speed):
        yield from _guarded(check, "torch does not work", INSTALL)
    try:
        check_local_rank(os.environ)
    except UserError as error:
        yield Check("fairseq import", PROBLEM, str(error), "unset LOCAL_RANK")
    else:
        for check in (check_fairseq, check_plugin, check_compiled):
            yield from _guarded(check, "fairseq does not work", INSTALL)
    yield check_disk()


def _guarded(check: Callable[[], Iterator[Check]], meaning: str, remedy: str) -> Iterator[Check]:
    """Yield the results of a check; an exception inside it becomes a problem to report."""
    try:
        yield from check()
    except Exception as error:
        name = check.__name__.removeprefix("check_")
        yield Check(name, PROBLEM, f"{meaning}: {type(error).__name__}: {error}", remedy)


def compare_version(name: str, version: str | None, oldest: str, newest: str, remedy: str) -> Check:
    """Return a problem below ``oldest``, and a warning above ``newest`` (compared to as many places as it has)."""
    if version is None:
        return Check(name, PROBLEM, "is not installed", remedy)
    tested = oldest if oldest == newest else f"{oldest} to {newest}"
    if _numbers(version) < _numbers(oldest):
        return Check(name, PROBLEM, f"{version}, but {tested} is needed", remedy)
    if _numbers(version)[: len(_numbers(newest))] > _numbers(newest):
        return Check(name, WARNING, f"{version} is newer than the tested version ({tested})", remedy)
    return Check(name, OK, version)


def check_fairseq_version() -> Check:
    found = {name: _installed(name) for name in (*FAIRSEQ, "fairseq")}
    found = {name: version for name, version in found.items() if version}
    detail = " and ".join(f"{name} {version}" for name, version in found.items()) or "is not installed"
    if len(found) != 1:
        remedy = f"pip uninstall {' '.join(found)}, then install {FAIRSEQ[0]} again" if found else INSTALL
        return Check("fairseq", PROBLEM, detail, remedy)
    if "fairseq" in found:
        return Check("fairseq", PROBLEM, f"{detail} does not run on Python 3.11 or newer", INSTALL)
    (version,) = found.values()
    if _numbers(version)[:3] != (0, 12, 3):
        return Check("fairseq", WARNING, f"{detail}, but 0.12.3 is the tested version", INSTALL)
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
        yield Check("threads", WARNING, detail, f"set OMP_NUM_THREADS={cores}: more threads than cores only wait")
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

    from smlp.config.presets import PRESETS
    from smlp.fairseq_compat.command_line import load_plugin

    try:
        load_plugin()
    except UserError as error:
        yield Check("plug-in", PROBLEM, str(error), "mend that file, or leave it out of SMLP_PLUGINS")
        return
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
    """Return ``2.13.0+cpu`` as (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def check_ranks(args: argparse.Namespace) -> int:
    """Check the ranks that torchrun or srun started, or start some on this machine and check them."""
    from smlp.cli.options import refuse_other_ranks
    from smlp.launch.ranks import has_terminal, place_of

    place = place_of(os.environ, is_interactive=has_terminal())
    if place is None:
        return _start_ranks(args)
    refuse_other_ranks(args.nproc, place)
    return _check_as_rank(place, args)


def _start_ranks(args: argparse.Namespace) -> int:
    import torch

    from smlp.launch.local import run_ranks, this_program

    num_ranks = args.nproc if args.nproc is not None else max(2, torch.cuda.device_count())
    if num_ranks < 2:
        raise UserError(f"--nproc {num_ranks}: at least 2 ranks are needed")
    if torch.cuda.is_available() and num_ranks > torch.cuda.device_count():
        raise UserError(f"--nproc {num_ranks} is more than the {torch.cuda.device_count()} GPUs of this machine")
    return run_ranks([*this_program(), *args.words], num_ranks)


def _check_as_rank(place: Any, args: argparse.Namespace) -> int:
    import torch

    from smlp.launch.ranks import device_index
    from smlp.launch.team import leave, meet

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", device_index(place, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    meet(place, "nccl" if device.type == "cuda" else "gloo", TIMEOUT)
    checks = rank_checks(device, Path(args.dir or ".").resolve())
    if place.rank == 0:
        status = report(checks, args.json)
    else:
        status = int(PROBLEM in [check.status for check in checks])  # a list: each check needs all ranks
    leave()
    return status


def rank_checks(device: Any, folder: Path) -> Iterator[Check]:
    """Run every check that needs all ranks."""
    import torch

    from smlp.config.presets import PRESETS
    from smlp.evaluation.self_check import ARCHS, check_checkpoint, check_collectives, check_layout, check_uneven_splits

    yield _agreed("ranks", lambda: _describe_ranks(device))
    yield _agreed("collectives", lambda: check_collectives(device))
    halves = [torch.bfloat16, torch.float16]
    for dtype in [torch.float32, *halves]:
        name = f"uneven splits, {str(dtype).removeprefix('torch.')}"
        yield _agreed(name, lambda dtype=dtype: check_uneven_splits(device, dtype))
    for arch in (*ARCHS, *PRESETS.added()):
        yield _agreed(f"experts of {arch}", lambda arch=arch: check_layout(arch, device, TIMEOUT))
    seen = _agreed("checkpoint", lambda: _seen(folder))
    yield seen if seen.status == PROBLEM else _agreed("checkpoint", lambda: check_checkpoint(folder, device, TIMEOUT))


def _seen(folder: Path) -> str:
    """Refuse a folder that is not there; nothing makes it, and nothing would remove it."""
    if not folder.is_dir():
        raise UserError(f"--dir {folder} is not a folder: name one on a disk that all nodes share")
    return str(folder)


def _agreed(name: str, check: Callable[[], str]) -> Check:
    """Run a check on this rank; the result is a problem if any rank has one.

    Raises:
        ParallelError: a rank is lost, so that the ranks cannot agree.
    """
    import torch.distributed as dist

    from smlp.launch.team import Team

    detail, problem = "", None
    try:
        detail = check()
    except Exception as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        problem = f"{kind}{error}"
    problems = Team(dist.get_rank(), dist.get_world_size()).gather(problem)
    found = [(rank, each) for rank, each in enumerate(problems) if each is not None]
    if found:
        where = "all ranks" if len(found) == len(problems) else f"ranks {[rank for rank, _ in found]}"
        return Check(name, PROBLEM, f"{where}: {found[0][1]}", _ASK_THE_OTHERS)
    return Check(name, OK, detail)


def _describe_ranks(device: Any) -> str:
    """Describe the ranks; refuse different versions."""
    import torch
    import torch.distributed as dist

    from smlp import __version__

    own = (socket.gethostname(), f"torch {torch.__version__}, smlp {__version__}", str(device.type))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    for what in (1, 2):
        kinds = {each[what]: rank for rank, each in reversed(list(enumerate(everyone)))}
        if len(kinds) > 1:
            raise UserError("ranks differ: " + "; ".join(f"rank {rank} has {kind}" for kind, rank in kinds.items()))
    hosts = list(dict.fromkeys(each[0] for each in everyone))
    return f"{len(everyone)} on {', '.join(hosts)}; {dist.get_backend()}, {own[1]}"
