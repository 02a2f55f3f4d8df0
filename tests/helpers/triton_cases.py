"""Cases for test_triton_spatial.py: kernels in Triton's interpreter, which must be chosen before Triton is imported.

``python triton_cases.py`` runs them all and prints what went wrong with each, as JSON.
"""

import itertools
import json
import os
import sys
import traceback
import warnings
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from comparing import spatial_reference
from torch.utils.checkpoint import checkpoint
from triton_problems import Broken, allowed, apply, compare, drawn, given_gradient, small_tiles

from smlp.config.presets import preset
from smlp.nn.blocks import SpatialGatingUnit
from smlp.nn.state import ForwardContext
from smlp.ops import causal_spatial_projection, fast_paths, first_use
from smlp.ops.tolerances import SHARE, largest_share

CASES = {}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def case(function):
    """A case under its own name."""
    CASES[function.__name__] = function
    return function


for _dtype, (_gate, _heads) in itertools.product(DTYPES, [(True, 3), (True, 1), (False, 1)]):
    CASES[f"values_{str(_dtype)[6:]}_{'gate' if _gate else 'plain'}_{_heads}"] = lambda d=_dtype, g=_gate, h=_heads: (
        compare(drawn(d, heads=h, width=9 if h == 1 else 5, gate=g), d)
    )

for _num_tokens, _context, _width in [(1, 1, 1), (1, 40, 16), (16, 16, 16), (32, 33, 3), (33, 33, 17), (48, 50, 8)]:
    CASES[f"sizes_{_num_tokens}_{_context}_{_width}"] = lambda n=_num_tokens, T=_context, c=_width: compare(
        drawn(num_tokens=n, context=T, width=c)
    )


@case
def no_sequences():
    for gate in (True, False):
        _, gradients = compare(drawn(num_seqs=0, num_tokens=17, context=20, heads=2, gate=gate))
        assert not gradients[1].any() and not gradients[2].any()


@case
def strides_of_all_kinds():
    x, weight, bias, gate = (tensor.detach() for tensor in drawn(heads=2, width=6))
    x = x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)  # positions side by side, features far apart
    weight = torch.stack([weight] * 3)[1].transpose(1, 2).contiguous().transpose(1, 2)
    bias = bias.t().contiguous().t()
    gate = gate[:1, :, :, :1].expand(2, -1, -1, 6)
    assert 0 in gate.stride() and 1 not in x.stride()[2:] and weight.stride(2) > 1
    grad = torch.tensor(0.5).expand(2, 35, 2, 6)  # as from a sum
    compare([tensor.requires_grad_() for tensor in (x, weight, bias, gate)], grad=grad)


@case
def sums_in_parts():
    from smlp.ops import triton_spatial

    x, weight, _ = (tensor.detach() for tensor in drawn(num_seqs=13, num_tokens=20, context=20, heads=2, gate=False))
    grad = given_gradient([x])
    whole = triton_spatial._weight_gradient(grad, x, weight)
    with mock.patch.object(triton_spatial, "_num_multiprocessors", lambda device: 10):
        assert triton_spatial._num_parts(2 * 3, 13, 10) == 3  # of 5, 5 and 3 steps
        parts, again = (triton_spatial._weight_gradient(grad, x, weight) for _ in range(2))
    assert torch.equal(parts, again)
    exact = torch.einsum("bmhc,bkhc->hmk", grad.double(), x.double()).tril()
    assert max(largest_share(whole, exact), largest_share(parts, exact)) <= allowed(torch.float32)
    assert not torch.equal(parts, whole), "summed in another order"


@case
def tiles_of_the_lower_triangle():
    from triton_probes import places_of_tiles

    edge = torch.arange(8192, dtype=torch.int32)
    row = torch.stack([edge, edge])
    column = torch.stack([torch.zeros_like(edge), edge])  # the first and the last of each row
    found = torch.empty_like(row), torch.empty_like(row)
    numbers = row * (row + 1) // 2 + column
    places_of_tiles[(1,)](numbers, *found, COUNT=numbers.numel())
    assert torch.equal(found[0], row) and torch.equal(found[1], column)


@case
def empty_parts():
    from smlp.ops import triton_spatial

    with mock.patch.object(triton_spatial, "_num_parts", lambda *sizes: 4):  # the last has nothing to do
        compare(drawn(num_seqs=3))


@case
def later_inputs_do_not_act():
    x, weight, bias, gate = (tensor.detach() for tensor in drawn())
    before = apply([x, weight, bias, gate])
    for t in (0, 15, 31, 33):
        changed = x.clone()
        changed[:, t + 1 :] = 1e3 * torch.randn(x[:, t + 1 :].shape)
        after = apply([changed, weight, bias, gate])
        assert torch.equal(after[:, : t + 1], before[:, : t + 1]), t
        assert not torch.equal(after, before)


@case
def the_same_every_time():
    inputs = drawn(torch.bfloat16)
    outputs = [apply(inputs) for _ in range(2)]
    gradients = [torch.autograd.grad(out, inputs, given_gradient(inputs)) for out in outputs]
    assert torch.equal(*outputs)
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@case
def the_fastest_settings_are_kept():
    from smlp.ops import triton_spatial
    from smlp.ops.triton_spatial import OutOfResources, launch, prescribed, size_class

    launched, choices = [], [{"BLOCK": size} for size in (16, 32, 64)]

    def milliseconds(run, choice):
        run(choice)
        return abs(choice["BLOCK"] - 40)

    def on_device(largest):
        def run(choice):
            if choice["BLOCK"] > largest:
                raise OutOfResources(choice["BLOCK"], largest, "shared memory")
            launched.append(choice["BLOCK"])

        return run

    with mock.patch.multiple(triton_spatial, INTERPRETED=False, _milliseconds=milliseconds, _fastest={}):
        for largest, kind, want in [(64, "a", [16, 32, 64, 32]), (64, "a", [32]), (16, "b", [16, 16]), (16, "b", [16])]:
            launched.clear()
            launch(on_device(largest), choices, kind)
            assert launched == want, (kind, launched)
        with pytest.raises(OutOfResources):
            launch(on_device(8), choices, "c")
        for number, want in [(0, 16), (1, 32), (2, 16)]:  # the last does not fit
            launched.clear()
            with prescribed(number):
                launch(on_device(32), choices, "a")
            assert launched == [want]
    assert size_class(512, 1023, 1) == size_class(1023, 512, 1) != size_class(1024, 512, 1)


@contextmanager
def chosen():
    """As if the CPU were a GPU whose kernels have not been used yet; collects the warnings."""
    first_use._believed.clear()
    with (
        mock.patch.object(fast_paths, "runs_triton", lambda device: True),
        mock.patch.multiple(fast_paths, FUSED_MULTIPLICATIONS=1, FUSED_WIDTH=1, FUSED_DTYPES=DTYPES),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        yield caught


def by_kernels(out):
    return type(out.grad_fn).__name__ == "FusedProjectionBackward"


@case
def the_operation_takes_the_kernels():
    with chosen() as caught:
        for gate in (True, False):
            inputs = drawn(gate=gate)
            state = torch.get_rng_state()
            with torch.device("meta"):  # a default device must not reach the check
                out = causal_spatial_projection(*inputs[:3], 0, *inputs[3:])
            assert by_kernels(out) and torch.equal(out, apply(inputs))
            assert torch.equal(state, torch.get_rng_state())
        with torch.inference_mode():
            first_use._believed.clear()
            assert torch.equal(causal_spatial_projection(*inputs), out)
        assert all(first_use._believed.values()) and not caught
        with fast_paths.reference_ops():
            assert not by_kernels(causal_spatial_projection(*inputs))


@case
def a_gating_unit_takes_one_kernel():
    torch.manual_seed(0)
    unit = SpatialGatingUnit.of(preset("gmlp_lm", ffn_dim=16, max_tokens=20, num_heads=2, spatial_init_scale=20.0))
    z = torch.randn(2, 18, 16, requires_grad=True)
    leaves = [z, *unit.parameters()]

    def run():
        out = unit(*z.chunk(2, dim=2), ForwardContext())
        return out, torch.autograd.grad(out.square().sum(), leaves)

    want, theirs = run()
    with chosen():
        got, ours = run()
        assert by_kernels(causal_spatial_projection(torch.randn(2, 18, 2, 4), unit.heads.weight, unit.heads.bias))
        first_use._believed.clear()  # the check must not be seen by what computes activations again
        again = checkpoint(lambda: unit(*z.chunk(2, dim=2), ForwardContext()), use_reentrant=False)
        recomputed = torch.autograd.grad(again.square().sum(), leaves)
    for our, their in zip((got, *ours, *recomputed), (want, *theirs, *theirs), strict=True):
        assert largest_share(our.detach(), their.detach()) <= SHARE[torch.float32]


def falls_back(kernel, broken, *words):
    """The check finds a broken kernel, says so once, and the results are right all the same."""
    from smlp.ops import triton_spatial

    with mock.patch.object(triton_spatial, kernel, broken), chosen() as caught:
        inputs = drawn(num_tokens=20, poison=False)
        for _ in range(2):
            out = causal_spatial_projection(*inputs[:3], gate_Bmhc=inputs[3])
            assert not by_kernels(out)
            want = spatial_reference(*(tensor.double() for tensor in inputs))
            assert largest_share(out.detach(), want.detach()) <= SHARE[torch.float32]
    (warning,) = caught
    text = str(warning.message)
    assert warning.category is RuntimeWarning and "\n" not in text
    assert all(word in text for word in ("cpu, float32, with gate", "PyTorch's products are used instead", *words)), (
        text
    )


@case
def a_wrong_output_is_found():
    from smlp.ops.triton_kernels import project

    def spoil(arguments, constants):
        if arguments[4] is None and not constants["TRANSPOSED"]:
            arguments[5].view(-1)[-1] += 0.1

    falls_back("project", Broken(project, spoil), "the output is off by")


@case
def a_wrong_gradient_is_found():
    from smlp.ops.triton_kernels import project, weight_gradient

    def transposed(arguments, constants):
        if constants["TRANSPOSED"]:
            arguments[5][0, 0] = 0

    def gate(arguments, constants):
        if arguments[6] is not None:
            arguments[6].mul_(1.01)

    falls_back("project", Broken(project, transposed), "the gradient of x is off by")
    falls_back("project", Broken(project, gate), "the gradient of the gate is off by")
    falls_back("weight_gradient", Broken(weight_gradient, lambda a, c: a[2].neg_()), "the gradient of the weights")
    falls_back("weight_gradient", Broken(weight_gradient, lambda a, c: a[2][:, 0, 5].fill_(1e-6)), "above the diagonal")


@case
def nan_is_found():
    from smlp.ops.triton_kernels import project

    falls_back("project", Broken(project, lambda a, c: a[5].view(-1)[:1].fill_(torch.nan)), "is off by nan")


@case
def a_kernel_that_does_not_compile():
    falls_back("project", Broken(None, error=RuntimeError("ptxas failed\nat line 1")), "RuntimeError: ptxas failed;")


def main():
    """Runs all cases; prints {name: traceback or None}."""
    small_tiles()
    results = {}
    for name, function in CASES.items():
        try:
            function()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    main()
