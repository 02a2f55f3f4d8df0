"""Runs many of fairseq's command-line tools for the price of one start.

Importing torch and fairseq takes seconds, running a tool on a tiny corpus a fraction of one. This script imports them
once and forks a process for each run; the tool then starts in it exactly as ``python -m fairseq_cli.TOOL`` does. Used
through the fixture ``run_fairseq_many``: reads one JSON list of cases from each line of its standard input, runs them
side by side as the cores allow, and answers with one JSON list of results.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
import recording

from smlp.launch.local import free_port


class Run:
    """The processes of one case: one, or as many as it has ranks."""

    def __init__(self, case: dict, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.started = time.monotonic()
        self.limit = self.started + case.get("timeout", 110)
        ranks = case.get("ranks", 1)
        port = free_port() if ranks > 1 else 0
        self.waiting = {_fork(case, rank, ranks, port, folder): rank for rank in range(ranks)}
        self.codes: dict[int, int] = {}
        self.seconds: dict[int, float] = {}

    def finished(self) -> bool:
        """Collect what has ended; kill what has run past the case's time limit."""
        for pid in list(self.waiting):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = self.waiting.pop(pid)
                self.codes[rank] = os.waitstatus_to_exitcode(status)
                self.seconds[rank] = time.monotonic() - self.started
            elif time.monotonic() > self.limit:
                os.kill(pid, signal.SIGKILL)
        return not self.waiting

    def result(self) -> dict:
        ranks = sorted(self.codes)
        out, err = ([(self.folder / f"{r}.{stream}").read_text() for r in ranks] for stream in ("out", "err"))
        return {
            "rc": max(self.codes.values(), key=abs),
            "stdout": "".join(out),
            "stderr": "".join(err),
            "ranks": [(self.codes[r], self.seconds[r], err[r]) for r in ranks],
        }


def _fork(case: dict, rank: int, ranks: int, port: int, folder: Path) -> int:
    """Start one process; returns its id. Its output goes to files in ``folder``."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for stream, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(folder / f"{rank}.{stream}", os.O_WRONLY | os.O_CREAT), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if ranks > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(case.get("environment", {}))
        if case.get("folder"):
            os.chdir(case["folder"])
        if case.get("record"):
            recording.record(Path(case["record"]) / f"{rank}.pt")
        if case.get("samples"):
            recording.record_samples(Path(case["samples"]))
        if case.get("fault"):
            faults.prepare(case["fault"], rank)
        if case.get("file_size_limit"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (case["file_size_limit"],) * 2)
        args = case.get("args_of_last", case["args"]) if rank == ranks - 1 else case["args"]
        sys.argv = [f"fairseq-{case['tool']}", *args]
        runpy.run_module(f"fairseq_cli.{case['tool']}", run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        # what Python itself does with an exception that nobody catches, without leaving this function
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# of this package's own, with what they import: nothing of it registers anything with fairseq or changes it
PLAIN_PACKAGES = ("costs", "fairseq_compat", "nn")


def _remembering(parse: Callable[[Any, str, str], Any]) -> Callable[[Any, str, str], Any]:
    """Most of the 300 settings that fairseq has hydra parse are the same in every run."""
    known: dict[tuple[str, str], Any] = {}

    def parse_rule(parser: Any, text: str, rule: str) -> Any:
        if (text, rule) not in known:
            known[text, rule] = parse(parser, text, rule)
        return known[text, rule]

    return parse_rule


def _warm_up() -> None:
    """What every run would otherwise do for itself: imports, and what hydra's parsers and inspect remember."""
    # Not the tools themselves: they set up logging when they are imported, each in its own order.
    import fairseq.trainer  # noqa: F401
    import torch._dynamo
    import torch.profiler  # noqa: F401
    from fairseq import options
    from fairseq.dataclass.initialize import hydra_init
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from hydra.core.override_parser.overrides_parser import OverridesParser

    package = importlib.import_module("smlp")
    for name in PLAIN_PACKAGES:
        for module in pkgutil.iter_modules([str(Path(package.__file__).parent / name)], f"smlp.{name}."):
            importlib.import_module(module.name)
    del sys.modules["smlp"]  # else fairseq would hold --user-dir to be loaded, and not look for the models
    hydra_init()
    OverridesParser.parse_rule = _remembering(OverridesParser.parse_rule)
    arguments = ["data", "--task", "language_modeling", "--arch", "transformer_lm", "--optimizer", "adam"]
    convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), arguments))
    gc.collect()
    gc.freeze()  # a run's collections leave alone what is here, and need no copies of its pages


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever fairseq prints while it is imported is not an answer
    _warm_up()
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request["folder"])
        todo = list(enumerate(request["cases"]))
        running: dict[int, Run] = {}
        results: dict[int, dict] = {}
        while todo or running:
            while todo and len(running) < len(os.sched_getaffinity(0)):
                number, case = todo.pop(0)
                running[number] = Run(case, folder / str(number))
            for number, run in list(running.items()):
                if run.finished():
                    results[number] = running.pop(number).result()
            time.sleep(0.01)
        print(json.dumps([results[number] for number in sorted(results)]), file=answers, flush=True)


if __name__ == "__main__":
    main()
