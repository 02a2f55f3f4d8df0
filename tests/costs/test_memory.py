"""Freed memory stays with a process that trains on a CPU (:mod:`smlp.fairseq_compat.startup`)."""

import platform

import pytest
from running import run_python

PROGRAM = """
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
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
@pytest.mark.parametrize(("before", "kept"), [("", True), ("os.environ['MALLOC_ARENA_MAX'] = '8'", False)])
def test_new_tensors_take_the_place_of_old_ones(before, kept):
    done = run_python("-c", PROGRAM.format(before=before), timeout=60)
    assert done.rc == 0, done.stderr
    word, faults = done.stdout.split()
    assert word == str(kept)
    assert (int(faults) < 50) == kept, faults
