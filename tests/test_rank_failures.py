"""Training over four ranks when one of them fails: all end soon, and say where they were."""

from __future__ import annotations

import re

import pytest
from test_layouts import command

pytestmark = pytest.mark.timeout(200)

#: what goes wrong, the exit code of the rank it happens to, and what its message says (nothing: it cannot say anything)
FAULTS = {
    "killed in the forward pass": ("smlp.moe.exchange:TokenExchange.combine", 4, "kill", -9, ""),
    "killed in the backward pass": ("smlp.parallel.all_to_all:AllToAll.backward", 5, "kill", -9, ""),
    "raises in a layer": ("smlp.moe.exchange:FeatureExchange.dispatch", 3, "raise", 1, "a fault of this rank's own"),
    "ends early": ("fairseq.trainer:Trainer.train_step", 2, "exit", 0, ""),
    "killed before gradients are reduced": ("smlp.trainer.gradients:average_expert_gradients", 2, "kill", -9, ""),
    "stalls": ("smlp.moe.exchange:TokenExchange.dispatch", 3, "stall", -9, ""),
}


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
