"""Causal spatial projection with bias and gate in one kernel, and its gradients, on NVIDIA GPUs.

Forward: one kernel (:func:`smlp.ops.triton_kernels.project`). Backward, with g the gradient of ``tril(W) x + b``: the
same kernel gives ``g = grad * gate`` and the gradient of the gate; transposed, it gives ``tril(W)^T g``; another one
gives ``g x^T``, of which only the lower half is computed.

Each kernel has a few launch settings, of which the fastest is measured at first use. No choice changes the order of a
sum: BLOCK_K and BLOCK, which would, are the same throughout a list.

Letters: ``B`` sequences, ``n`` tokens (n <= T), ``h`` heads, ``c`` features of one head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from smlp.ops.fast_paths import first_order_only
from smlp.ops.triton_kernels import add_parts, project, weight_gradient

Settings = dict[str, int]

#: the fastest of the trials on an H200 (docs/performance.md). Shared memory: (BLOCK_M + BLOCK_N) * BLOCK_K * 2 bytes *
#: num_stages, at most 160 KiB on sm_80
PROJECTION: list[Settings] = [
    {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
    {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
    {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3},
]
WEIGHT_GRADIENT: list[Settings] = [
    {"BLOCK": 128, "num_warps": 4, "num_stages": 3},
    {"BLOCK": 128, "num_warps": 8, "num_stages": 4},
    {"BLOCK": 128, "num_warps": 8, "num_stages": 3},
]
NUM_CHOICES = 3

#: whether TRITON_INTERPRET was set when Triton was imported
INTERPRETED = not isinstance(project, triton.JITFunction)

_WARM_UP, _REPEATS = 2, 8
_fastest: dict[Hashable, Settings] = {}
_prescribed: ContextVar[int | None] = ContextVar("prescribed", default=None)

#: features in one step of a sum over sequences and features: at most, and at least (a tensor core's)
_MOST_FEATURES, _FEWEST_FEATURES = 64, 16
#: a sum is split among programs if each is left so many steps
_STEPS_OF_PART = 4
#: programs that a multiprocessor runs at a time
_PROGRAMS_EACH = 2
#: rows of a tile for one program that adds up the parts of a sum
_STRIP = 16


class FusedProjection(torch.autograd.Function):
    """``(tril(W_i) @ x_i + b_i) * gate_i`` for every head i; shapes as in :func:`smlp.ops.causal_spatial_projection`.

    Keeps its inputs and nothing else. The projection itself, which the gradient of the gate needs, is recomputed. Kept,
    it would be one more activation of x's size in each layer, written once and read once; recomputed, it costs T/2
    multiply-adds for each of its elements, in a kernel that has to read grad and gate and write both gradients anyway.
    """

    @staticmethod
    def forward(ctx: Any, x_Bnhc: Tensor, weight_hTT: Tensor, bias_hT: Tensor, gate_Bnhc: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_Bnhc, weight_hTT, bias_hT, gate_Bnhc)
        return fused_forward(x_Bnhc, weight_hTT, bias_hT, gate_Bnhc)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_Bnhc: Tensor) -> tuple[Tensor | None, ...]:
        return fused_backward(grad_Bnhc, *ctx.saved_tensors)


def fused_forward(x_Bnhc: Tensor, weight_hTT: Tensor, bias_hT: Tensor, gate_Bnhc: Tensor | None) -> Tensor:
    """Return the output, (B, n, h, c), contiguous."""
    out_Bnhc = torch.empty(x_Bnhc.shape, dtype=x_Bnhc.dtype, device=x_Bnhc.device)
    _project(x_Bnhc, weight_hTT, out_Bnhc, bias_hT, gate_Bnhc)
    return out_Bnhc


def fused_backward(
    grad_Bnhc: Tensor, x_Bnhc: Tensor, weight_hTT: Tensor, bias_hT: Tensor, gate_Bnhc: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, weight, bias and gate, contiguous, from that of the output."""
    grad_gate_Bnhc = None
    if gate_Bnhc is not None:
        grad_y_Bnhc = torch.empty(x_Bnhc.shape, dtype=x_Bnhc.dtype, device=x_Bnhc.device)
        grad_gate_Bnhc = torch.empty_like(grad_y_Bnhc)
        _project(x_Bnhc, weight_hTT, grad_y_Bnhc, bias_hT, gate_Bnhc, grad_Bnhc, grad_gate_Bnhc)
        grad_Bnhc = grad_y_Bnhc
    grad_x_Bnhc = torch.empty(x_Bnhc.shape, dtype=x_Bnhc.dtype, device=x_Bnhc.device)
    _project(grad_Bnhc, weight_hTT.transpose(1, 2), grad_x_Bnhc, transposed=True)
    grad_weight_hTT = _weight_gradient(grad_Bnhc, x_Bnhc, weight_hTT)
    grad_bias_hn = grad_Bnhc.sum(dim=(0, 3)).t()
    grad_bias_hT = F.pad(grad_bias_hn, (0, bias_hT.size(1) - x_Bnhc.size(1)))
    return grad_x_Bnhc, grad_weight_hTT, grad_bias_hT, grad_gate_Bnhc


def _project(
    x_Bnhc: Tensor,
    weight_hTT: Tensor,
    out_Bnhc: Tensor,
    bias_hT: Tensor | None = None,
    gate_Bnhc: Tensor | None = None,
    grad_Bnhc: Tensor | None = None,
    grad_gate_Bnhc: Tensor | None = None,
    transposed: bool = False,
) -> None:
    """Launches :func:`smlp.ops.triton_kernels.project`; ``transposed``: the weights are given as upper triangles."""
    num_seqs, num_tokens, num_heads, width = x_Bnhc.shape
    num_columns, context = num_seqs * width, weight_hTT.size(1)
    if out_Bnhc.numel() == 0:
        return
    arguments = (
        *(x_Bnhc, weight_hTT, bias_hT, gate_Bnhc, grad_Bnhc, out_Bnhc, grad_gate_Bnhc),
        *(num_tokens, context, width, num_columns, *x_Bnhc.stride(), *weight_hTT.stride()),
        *((0, 0) if bias_hT is None else bias_hT.stride()),
        *_strides(gate_Bnhc),
        *_strides(grad_Bnhc),
        *out_Bnhc.stride()[:2],
    )

    def run(settings: Settings) -> None:
        num_tiles = triton.cdiv(num_tokens, settings["BLOCK_M"]) * triton.cdiv(num_columns, settings["BLOCK_N"])
        project[(num_tiles, num_heads)](*arguments, TRANSPOSED=transposed, WIDEN=INTERPRETED, **settings)

    kind = (transposed, gate_Bnhc is None, grad_Bnhc is None, x_Bnhc.device, x_Bnhc.dtype)
    with torch.cuda.device_of(x_Bnhc):
        launch(run, PROJECTION, (kind, size_class(num_tokens, num_columns, num_heads)))


def _weight_gradient(grad_Bnhc: Tensor, x_Bnhc: Tensor, weight_hTT: Tensor) -> Tensor:
    """Return ``tril(sum over B, c of grad x^T)``, (h, T, T), zeros above the diagonal."""
    num_seqs, num_tokens, num_heads, width = x_Bnhc.shape
    context = weight_hTT.size(1)
    grad_weight_hTT = torch.empty(weight_hTT.shape, dtype=weight_hTT.dtype, device=weight_hTT.device)
    block = WEIGHT_GRADIENT[0]["BLOCK"]
    num_rows = triton.cdiv(context, block)
    num_tiles = num_rows * (num_rows + 1) // 2
    block_of_width = min(max(triton.next_power_of_2(width), _FEWEST_FEATURES), _MOST_FEATURES)
    num_steps = num_seqs * triton.cdiv(width, block_of_width)
    num_parts = _num_parts(num_tiles * num_heads, num_steps, _num_multiprocessors(x_Bnhc.device))
    if num_parts > 1:
        shape = (num_parts, num_heads, num_tiles, block, block)
        out = torch.empty(shape, dtype=torch.float32, device=x_Bnhc.device)
    else:
        out = grad_weight_hTT
    sizes = (num_tokens, context, num_seqs, width)
    arguments = (grad_Bnhc, x_Bnhc, out, *sizes, *grad_Bnhc.stride(), *x_Bnhc.stride())
    constants = {"SPLIT": num_parts > 1, "BLOCK_C": block_of_width, "WIDEN": INTERPRETED}

    def run(settings: Settings) -> None:
        weight_gradient[(num_tiles, num_heads, num_parts)](*arguments, **constants, **settings)

    kind = (x_Bnhc.device, x_Bnhc.dtype, num_parts, block_of_width)
    with torch.cuda.device_of(x_Bnhc):
        launch(run, WEIGHT_GRADIENT, (kind, size_class(context, num_steps, num_heads)))
        if num_parts > 1:
            grid = (num_tiles, num_heads, triton.cdiv(block, _STRIP))
            add_parts[grid](out, grad_weight_hTT, context, num_parts, STRIP=_STRIP, BLOCK=block)
    return grad_weight_hTT


def _num_parts(num_programs: int, num_steps: int, num_multiprocessors: int) -> int:
    """Return the number of parts of each sum: as many as can run at the same time, and at least one.

    It depends on shapes and the device alone, so that every run adds up in the same order.
    """
    room = _PROGRAMS_EACH * num_multiprocessors // max(num_programs, 1)
    return max(min(room, num_steps // _STEPS_OF_PART), 1)


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _strides(tensor_Bnhc: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if tensor_Bnhc is None else tensor_Bnhc.stride()


@contextlib.contextmanager
def prescribed(number: int) -> Iterator[None]:
    """Launch every kernel inside the block with its choice ``number``, or the next that the device can run."""
    token = _prescribed.set(number)
    try:
        yield
    finally:
        _prescribed.reset(token)


def launch(run: Callable[[Settings], None], choices: Sequence[Settings], kind: Hashable) -> None:
    """Runs a kernel with the settings that are the fastest for this kind of problem; measures them if it is a new kind.

    Args:
        run: launches the kernel; must not depend on what the outputs held before.
        choices: settings.
        kind: what the measurement holds for, devices and sizes included.

    Raises:
        OutOfResources: the device is too small for every choice.
    """
    number = _prescribed.get()
    if number is not None:
        _first_that_fits(run, [*choices[number:], *choices[:number]])
        return
    choice = _fastest.get(kind)
    if choice is None:
        choice = _fastest[kind] = choices[0] if INTERPRETED else _measured(run, choices)
    run(choice)


def size_class(*sizes: int) -> tuple[int, ...]:
    """Return the kind of a problem: sizes between the same powers of two count as one."""
    return tuple(size.bit_length() for size in sizes)


def _first_that_fits(run: Callable[[Settings], None], choices: Sequence[Settings]) -> None:
    for choice in choices[:-1]:
        with contextlib.suppress(OutOfResources):
            run(choice)
            return
    run(choices[-1])


def _measured(run: Callable[[Settings], None], choices: Sequence[Settings]) -> Settings:
    """Return the choice with which the kernel is fastest, among those that the device can run."""
    times = []
    for number, choice in enumerate(choices):
        try:
            times.append((_milliseconds(run, choice), number))
        except OutOfResources:
            if number == len(choices) - 1 and not times:
                raise
    return choices[min(times)[1]]


def _milliseconds(run: Callable[[Settings], None], choice: Settings) -> float:
    """Time ``_REPEATS`` launches, one after the other."""
    for _ in range(_WARM_UP):
        run(choice)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_REPEATS):
        run(choice)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
