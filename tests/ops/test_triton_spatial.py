"""Triton's kernels: in its interpreter, through its compiler, and when they are chosen. No GPU is needed.

The interpreter is chosen by the environment when Triton is imported, so both run in processes of their own; the cases
are in triton_cases.py.
"""

import contextlib
import json
import os
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import triton_cases
from running import REPOSITORY, run_python
from torch.utils.flop_counter import FlopCounterMode

from smlp.ops import causal_spatial_projection, fast_paths
from smlp.ops.fast_paths import fuse, reference_ops
from smlp.ops.tolerances import largest_share

pytestmark = pytest.mark.long

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def interpreted():
    """What went wrong with each case, or None."""
    done = run_python(REPOSITORY / "tests" / "helpers" / "triton_cases.py", timeout=200)
    assert done.rc == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_triton
@pytest.mark.parametrize("name", triton_cases.CASES)
def test_in_the_interpreter(name, interpreted):
    assert interpreted[name] is None, interpreted[name]


@pytest.mark.slow
@needs_triton
def test_the_compiler_takes_the_kernels(tmp_path):
    script = REPOSITORY / "tests" / "helpers" / "triton_compiling.py"
    with mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": str(tmp_path)}):
        os.environ.pop("TRITON_INTERPRET", None)
        done = run_python(script, timeout=200)
    assert done.rc == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name.rpartition("_")[2] for name in found} == {"80", "90"}
    for name, counts in found.items():
        assert counts["atomic"] == 0, "sums must not depend on who comes first"
        if name.startswith("parts"):
            continue
        assert counts["tensor core"] > 0 and counts["wide copies"] > 0, (name, counts)
        assert counts["narrow copies"] == 0, f"{name}: elements are loaded one by one: {counts}"


def test_triton_is_not_imported_where_it_is_not_used():
    code = """
import sys, torch
from smlp.ops import causal_spatial_projection
causal_spatial_projection(torch.randn(1, 512, 1, 2), torch.randn(1, 512, 512), torch.randn(1, 512))
sys.exit("triton" in sys.modules)
"""
    assert run_python("-c", code).rc == 0


def inputs(dtype=torch.bfloat16, gate=True, width=16):
    shape = (2, 8, 2, width)  # 4,096 multiplications for a width of 16
    tensors = [torch.randn(shape), torch.randn(2, 8, 8), torch.randn(2, 8)]
    return [tensor.to(dtype) for tensor in [*tensors, *([torch.randn(shape)] if gate else [])]]


@pytest.fixture
def on_a_gpu(monkeypatch):
    """As if this were a GPU, on which small products are worth the kernels."""
    monkeypatch.setattr(fast_paths, "runs_triton", lambda device: True)
    monkeypatch.setattr(fast_paths, "FUSED_MULTIPLICATIONS", 4096)


def chosen(tensors, start=0):
    return fuse(tensors[0].size(1), start, *tensors)


def test_cpus_have_no_use_for_it(monkeypatch):
    monkeypatch.setattr(fast_paths, "FUSED_MULTIPLICATIONS", 1)
    assert not chosen(inputs())


def test_what_is_fused(on_a_gpu):
    for dtype in fast_paths.FUSED_DTYPES:
        assert chosen(inputs(dtype)) and chosen(inputs(dtype, gate=False))
    assert chosen([torch.nn.Parameter(tensor) for tensor in inputs()])
    with torch.device("cpu"):  # a mode that only says where tensors are made
        assert chosen(inputs())


def test_what_is_left_to_torch(on_a_gpu):
    given = inputs()
    assert not chosen(given, start=1)
    assert not chosen([tensor[:1] if tensor.dim() == 4 else tensor for tensor in given]), "too small"
    assert not chosen(inputs(width=24)), "16 does not divide it"
    assert not chosen(inputs(torch.float32))
    assert not chosen([*given[:3], given[3].half()])
    assert not chosen([*given[:3], given[3].to("meta")])
    with reference_ops():
        assert not chosen(given)
    with torch.autocast("cpu", torch.bfloat16):
        assert not chosen(given)
    with FlopCounterMode(display=False):  # counts what torch is asked for, and nothing else
        assert not chosen(given)
    seen = []
    torch.jit.trace(lambda x: (seen.append(chosen([x, *given[1:]])), x + 1)[1], given[0], check_trace=False)
    assert seen == [False]


@pytest.mark.parametrize("installed", [True, False])
def test_where_triton_runs(installed, monkeypatch):
    monkeypatch.setattr(fast_paths, "_triton_is_installed", lambda: installed)
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert not fast_paths.runs_triton(torch.device("cpu"))
    assert fast_paths.runs_triton(torch.device("cuda", 0)) == installed
    capability = (7, 5)
    assert not fast_paths.runs_triton(torch.device("cuda", 0))


def test_differences_are_measured_against_the_largest_value():
    want = torch.tensor([0.0, -4.0, 2.0], dtype=torch.double)
    assert largest_share(torch.tensor([1.0, -4.0, 2.0]), want) == 0.25
    assert largest_share(want, want) == largest_share(want[:0], want[:0]) == 0
    assert not largest_share(torch.tensor([torch.nan, -4.0, 2.0]), want) <= 1


def test_a_gate_costs_no_more_memory_than_the_product_with_it():
    """What a CPU keeps for the backward pass: inputs, the gate, and the projection that the gate multiplies."""
    x, gate = torch.randn(2, 1, 512, 2, 3).requires_grad_()
    weight, bias = torch.randn(2, 512, 512, requires_grad=True), torch.randn(2, 512, requires_grad=True)
    for path in (contextlib.nullcontext, reference_ops):
        with path():
            sizes = {}
            pack = lambda tensor, sizes=sizes: sizes.update({tensor.data_ptr(): tensor.numel()}) or tensor  # noqa: E731
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                out = causal_spatial_projection(x, weight, bias, gate_Bmhc=gate)
        assert sum(sizes.values()) <= 3 * out.numel() + weight.numel()
