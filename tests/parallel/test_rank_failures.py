"""Training over ranks of which one fails: all end soon, and say where they were."""

from __future__ import annotations

import re
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from layouts import command

from smlp.launch.local import free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]

#: what goes wrong, the exit code of the rank it happens to, and what its message says (nothing: it cannot say anything)
FAULTS = {
    "killed in the forward pass": ("smlp.moe.exchange:TokenExchange.combine", 4, "kill", -9, ""),
    "killed in the backward pass": ("smlp.parallel.group:AllToAll.backward", 5, "kill", -9, ""),
    "raises in a layer": ("smlp.moe.exchange:FeatureExchange.dispatch", 3, "raise", 1, "a fault of this rank's own"),
    "ends early": ("fairseq.trainer:Trainer.train_step", 2, "exit", 0, ""),
    "killed before gradients are reduced": ("smlp.fairseq_compat.experts:average_expert_gradients", 2, "kill", -9, ""),
    "stalls": ("smlp.moe.exchange:TokenExchange.dispatch", 3, "stall", -9, ""),
}


@pytest.mark.slow
def test_all_ranks_end_within_seconds(tiny_data, tmp_path, run_fairseq_many):
    cases = []
    for number, (place, call, how, _, _) in enumerate(FAULTS.values()):
        case = command(tiny_data, "smlp", 4, 4, "--save-dir", tmp_path / str(number), "--heartbeat-timeout", 8)
        fault = {"rank": 2, "place": place, "call": call, "how": how}
        cases.append({**case, "timeout": 40, "fault": fault})
    for name, run in zip(FAULTS, run_fairseq_many(cases, timeout=200), strict=True):
        _, _, how, code, said = FAULTS[name]
        failed_code, _, failed_message = run.ranks[2]
        assert (failed_code == code or how == "stall") and said in failed_message, (name, run.ranks[2])
        for rank in (0, 1, 3):
            ended, seconds, message = run.ranks[rank]
            assert ended == 1 and seconds < 30, (name, rank, ended, seconds, message)
            last = message.strip().splitlines()[-1]
            assert "smlp: error" in last and f"rank {rank} " in last, (name, message)
            if "moe.exchange" in FAULTS[name][0]:
                assert re.search(r"layer \d \([st]MoE\).*\(\d+, .*\d\) torch.float32", last), (name, message)


GLOO = (
    "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5861. This is typically caused by a "
    "remote worker crashing. Check the logs"
)
#: outside of the experts' exchanges: where rank 1 is killed, in which call, and where rank 0 says that it waited
ELSEWHERE = {
    "update": ("fairseq.trainer:Trainer.train_step", 1, "update 1, sum of the statistics"),
    "gradients": ("fairseq.optim:FairseqOptimizer.all_reduce_grads", 2, "update 2, sum of the gradients"),
    "validation": ("fairseq.trainer:Trainer.valid_step", 1, "validation, sum of the statistics"),
    "end": ("torch.distributed:barrier", 1, "end of the run"),
}


def test_the_place_is_named_where_fairseq_waits(tiny_data, tmp_path, run_fairseq_many):
    cases = []
    for name, (place, call, _) in ELSEWHERE.items():
        options = ["--save-dir", tmp_path / name, "--max-update", 2]
        case = command(tiny_data, "dense_lm", 2, 1, *options)
        case["args"] = [argument for argument in case["args"] if argument != "--disable-validation"]
        cases.append({**case, "timeout": 40, "fault": {"rank": 1, "place": place, "call": call, "how": "kill"}})
    for name, run in zip(ELSEWHERE, run_fairseq_many(cases, timeout=180), strict=True):
        (status, _, message), (killed, _, _) = run.ranks
        assert (status, killed) == (1, -9), (name, message)
        assert "Traceback" not in message
        assert f"smlp: error: rank 0 of 2: {ELSEWHERE[name][2]} failed (" in message.strip().splitlines()[-1], name


@pytest.mark.parametrize(
    ("message", "ranks", "said"),
    [
        (GLOO, 4, "rank 2 of 4: start failed (Connection closed by peer [127.0.0.1]:5861): look for the rank that"),
        (GLOO, 1, None),
        (
            "[enforce fail at /gloo/tcp/device.cc:84] ifa != nullptr. Unable to find address for: nope0",
            *(2, "rank 2 of 2: start failed: GLOO_SOCKET_IFNAME names nope0, and this machine has no such interface"),
        ),
        ("DataLoader worker (pid 7) exited unexpectedly", 4, None),
    ],
)
def test_only_collectives_are_taken_for_lost_ranks(message: str, ranks: int, said: str | None) -> None:
    from smlp.fairseq_compat.lost_ranks import lost_rank

    lost = lost_rank(RuntimeError(message), SimpleNamespace(distributed_rank=2, distributed_world_size=ranks))
    assert lost is None if said is None else str(lost).startswith(said)


def test_the_heartbeat_limits_waiting_from_the_start(monkeypatch):
    """Not only from the first forward pass, as fairseq's own watch."""
    import torch.distributed as dist

    from smlp.fairseq_compat.lost_ranks import collective_timeout, limit_waiting

    for name in ("init_process_group", "new_group"):
        monkeypatch.setattr(dist, name, lambda *args, timeout=None, **kw: timeout)
    assert collective_timeout(-1) is collective_timeout(None) is None
    limit_waiting(collective_timeout(20))
    assert dist.init_process_group("gloo", rank=0) == dist.new_group() == timedelta(seconds=15)
    assert dist.new_group([0], timeout=timedelta(seconds=1)) == timedelta(seconds=1)


def test_ranks_that_never_meet_end_soon_without_a_heartbeat(monkeypatch):
    """A rank that has ended without an error before the others are connected leaves no sign."""
    import torch.distributed as dist

    from smlp.fairseq_compat import lost_ranks

    for name in ("init_process_group", "new_group"):
        monkeypatch.setattr(dist, name, getattr(dist, name))
    monkeypatch.setattr(lost_ranks, "MEETING", timedelta(seconds=1))
    lost_ranks.limit_waiting(None)
    start = time.monotonic()
    with pytest.raises(dist.DistError) as caught:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=2)
    assert time.monotonic() - start < 20
    ranks = SimpleNamespace(distributed_rank=0, distributed_world_size=2)
    assert "rank 0 of 2: start failed (" in str(lost_ranks.lost_rank(caught.value, ranks))


def test_ranks_that_have_met_may_wait_longer(monkeypatch):
    import torch.distributed as dist

    from smlp.fairseq_compat import lost_ranks

    for name in ("init_process_group", "new_group"):
        monkeypatch.setattr(dist, name, getattr(dist, name))
    monkeypatch.setattr(lost_ranks, "MEETING", timedelta(seconds=7))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which a process group replaces
    lost_ranks.limit_waiting(None)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        limits = [
            group._get_backend(torch.device("cpu")).options._timeout for group in (dist.group.WORLD, dist.new_group())
        ]
    finally:
        dist.destroy_process_group()
    assert limits == [timedelta(minutes=30)] * 2
