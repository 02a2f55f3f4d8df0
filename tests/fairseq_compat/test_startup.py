"""What a command imports before its first update, and freed memory (:mod:`smlp.fairseq_compat.startup`)."""

import platform

import pytest
from running import run_python

from smlp.cli.doctor import machine_checks
from smlp.errors import UserError
from smlp.fairseq_compat.command_line import load_plugin

IMPORTS = """
import sys
from smlp.fairseq_compat.command_line import load_plugin

load_plugin()
import torch
from fairseq.optim.adam import Adam  # as fairseq-train uses it

weight = torch.nn.Parameter(torch.ones(3))
optimizer = Adam([weight], lr=0.5)
weight.sum().backward()
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
optimizer.zero_grad()
assert weight.grad is None and abs(weight[0].item() - 0.5) < 1e-6, weight
slow = ("torch._dynamo", "sklearn", "sklearn.metrics", "scipy.stats", "wandb")
print([name for name in slow if name in sys.modules])

from fairseq.criterions.sentence_prediction import f1_score, pearsonr

print(f1_score([0, 1, 1], [0, 1, 1]), round(float(pearsonr([1, 2, 3], [2, 4, 6])[0]), 6))
import sklearn.metrics, scipy.stats

print(sklearn.metrics.f1_score.__module__.partition(".")[0], scipy.stats.norm.name)

from fairseq.logging import progress_bar

if progress_bar.wandb is not None:  # an extra
    init = progress_bar.wandb.init  # as fairseq-train --wandb-project uses it
    assert init is sys.modules["wandb"].init, init
"""


@pytest.mark.slow
def test_what_takes_seconds_is_imported_when_it_is_used():
    done = run_python("-c", IMPORTS, timeout=60)
    assert done.rc == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "1.0 1.0", "sklearn norm"]


MEMORY = """
import os, resource, sys
{before}
import torch
from smlp.fairseq_compat.startup import keep_freed_memory

kept = keep_freed_memory()
for _ in range(12):
    torch.ones(2**24)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.ones(2**24)  # 64 MiB, beyond what glibc ever keeps by itself: 16384 pages of 4 KiB, 32 of 2 MiB
print(kept is not None, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


HOLES = """
import torch
from smlp.fairseq_compat.startup import _held_bytes, keep_freed_memory

memory, done, held = keep_freed_memory(), [], []
for count in (1, 20, 150, 1, 20):
    blocks = [torch.ones(2**20) for _ in range(count)]  # 4 MiB each
    del blocks
    held.append(_held_bytes() >> 20)
    done.append(memory.after_update())
print(*done, held[2] - held[1], held[3] - held[0])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_holes_are_given_back_when_memory_has_grown_by_half():
    done = run_python("-c", HOLES, timeout=60)
    assert done.rc == 0, done.stderr
    *given_back, grown, left = done.stdout.split()
    assert given_back == ["False", "False", "True", "False", "False"]
    assert int(grown) > 400 and int(left) < 100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
@pytest.mark.parametrize(("before", "kept"), [("", True), ("os.environ['MALLOC_ARENA_MAX'] = '8'", False)])
def test_new_tensors_take_the_place_of_old_ones(before, kept):
    done = run_python("-c", MEMORY.format(before=before), timeout=60)
    assert done.rc == 0, done.stderr
    word, faults = done.stdout.split()
    assert word == str(kept)
    assert (int(faults) < 50) == kept, faults


@pytest.mark.parametrize("value", ["", "abc", "1.5"])
def test_a_number_that_fairseq_reads_when_it_is_imported(value, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", value)
    with pytest.raises(UserError, match=f"LOCAL_RANK is '{value}', not a number"):
        load_plugin()
    (found,) = [check for check in machine_checks() if check.remedy == "unset LOCAL_RANK"]
    assert "not a number" in found.detail
