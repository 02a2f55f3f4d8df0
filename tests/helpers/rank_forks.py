"""Runs cases of rank_cases.py and rank_group_cases.py in several ranks each, for the price of one start.

Importing torch takes seconds, forking a process that has imported it milliseconds. Used through ``rank_running``: reads
one JSON case from each line of standard input, forks a process for each rank, connects them by gloo through a file, and
answers with one JSON line. What runs past its time limit is killed, and all of it when standard input closes.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import rank_cases
import rank_check_cases
import rank_costs_cases
import rank_group_cases
import rank_shuffle_cases
import torch
import torch._dynamo  # what every optimiser imports when it is first used
import torch.distributed as dist

#: functions by name
CASES = {
    **vars(rank_cases),
    **vars(rank_check_cases),
    **vars(rank_costs_cases),
    **vars(rank_group_cases),
    **vars(rank_shuffle_cases),
}


def _rank(case: dict, rank: int, folder: Path) -> None:
    """One rank, in a process of its own; does not return."""
    status = 1
    try:
        for number in (1, 2):
            os.dup2(os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=case["ranks"],
            timeout=timedelta(seconds=case["collective_timeout"]),
        )
        result = CASES[case["case"]](**case["arguments"])
        (folder / f"{rank}.json").write_text(json.dumps(result))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(case: dict) -> dict:
    folder = Path(case["folder"])
    started = time.monotonic()
    waiting = {}
    for rank in range(case["ranks"]):
        pid = os.fork()
        if pid == 0:
            _rank(case, rank, folder)
        waiting[pid] = rank
    codes, seconds = {}, {}
    while waiting:
        for pid, rank in list(waiting.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[rank], seconds[rank] = os.waitstatus_to_exitcode(status), time.monotonic() - started
                del waiting[pid]
            elif time.monotonic() - started > case["timeout"]:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    ranks = range(case["ranks"])
    results = [folder / f"{rank}.json" for rank in ranks]
    return {
        "codes": [codes[rank] for rank in ranks],
        "seconds": [seconds[rank] for rank in ranks],
        "errors": [(folder / f"{rank}.err").read_text() for rank in ranks],
        "results": [json.loads(path.read_text()) if path.exists() else None for path in results],
    }


if __name__ == "__main__":
    gc.freeze()  # a rank's collections leave alone what is here, and need no copies of its pages
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)
