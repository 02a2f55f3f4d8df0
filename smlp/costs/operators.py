"""Teach fvcore the operators of this package: handles that it lacks, and operators that cost nothing, with the reason.

fvcore skips operators that it does not know, with a warning at most. Here an operator that is neither in its tables nor
in these counts as a matrix product until it is added to a table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from fvcore.nn import FlopCountAnalysis
from fvcore.nn.jit_handles import elementwise_flop_counter, get_shape
from torch import Tensor
from torch.overrides import TorchFunctionMode

from smlp.errors import UserError

#: share of the total above which an unknown operator is an error
TOLERATED_SHARE = 1e-3

_ELEMENTWISE = "a few operations for each element, which the convention does not count"
_MOVES = "moves or makes data, no arithmetic"
_INDICES = "integers about routing, not features"
#: operators that fvcore does not know and that count as 0, with the reason
FREE = {
    **dict.fromkeys(("add", "sub", "mul", "div", "neg", "clamp_min", "sum", "linalg_vector_norm"), _ELEMENTWISE),
    **dict.fromkeys(("gelu", "silu", "sigmoid", "softmax", "tanh", "mean"), _ELEMENTWISE),
    **dict.fromkeys(("embedding", "index_select", "index_copy", "index_add_", "pad", "tril", "unflatten"), _MOVES),
    **dict.fromkeys(("expand_as", "flip", "unfold", "where"), _MOVES),
    **dict.fromkeys(("abs", "cos", "log", "pow", "sin"), "of tables of positions or distances, not of features"),
    "index_put": _MOVES,
    **dict.fromkeys(("argsort", "bincount", "cumsum", "empty_like", "le", "lt", "numel"), _INDICES),
}


def _baddbmm(inputs: list[Any], outputs: list[Any]) -> int:
    """Return the multiply-adds of (b, m, k) @ (b, k, n)."""
    return math.prod(get_shape(inputs[1])) * get_shape(inputs[2])[-1]


def _attention(inputs: list[Any], outputs: list[Any]) -> int:
    """Count the scores and their product with the values: queries (..., n, d), keys (..., m, d), values (..., m, c)."""
    query, key, value = (get_shape(tensor) for tensor in inputs[:3])
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


HANDLES = {
    "aten::baddbmm": _baddbmm,
    "aten::scaled_dot_product_attention": _attention,
    # gain and offset of several experts' layer norms: the extra cost of an affine norm
    "aten::addcmul": elementwise_flop_counter(0, 1),
}


def prepare(analysis: FlopCountAnalysis) -> FlopCountAnalysis:
    """Teach an analysis the operators above."""
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    analysis.set_op_handle(**HANDLES, **{f"aten::{name}": None for name in FREE})
    return analysis


def unknown_operators(analysis: FlopCountAnalysis) -> dict[str, dict[str, float]]:
    """Return the estimated multiply-adds, by module, of each operator of a finished analysis that no table knows."""
    unknown = sorted(analysis.unsupported_ops())
    if not unknown:
        return {}
    estimates = analysis.copy().set_op_handle(**{name: _estimate(name) for name in unknown}).by_module_and_operator()
    return {name: {module: counts[name] for module, counts in estimates.items()} for name in unknown}


def refuse_if_it_costs(name: str, estimate: float, counted: float) -> None:
    """Refuse an unknown operator unless it costs next to nothing.

    Args:
        name: of the operator.
        estimate: its multiply-adds.
        counted: those of all known operators.

    Raises:
        UserError: it may cost more than 0.1 % of the model; the message names it.
    """
    share = estimate / max(counted + estimate, 1)
    if share > TOLERATED_SHARE:
        raise UserError(
            f"operator {name} is not counted and may cost {estimate:.3g} multiply-adds, {share:.1%} of the model: "
            "smlp.costs.operators needs a handle for it, or the reason why it is free"
        )


def _estimate(name: str) -> Any:
    """Return a handle for an unknown operator: sqrt(|a| * |b| * |out|) for its two largest operands, which is exact for
    a product of matrices and too much for most else; the larger side of an operator with one operand."""

    def handle(inputs: list[Any], outputs: list[Any]) -> Counter:
        sizes = sorted((size for value in inputs for size in _sizes(value)), reverse=True)
        out = max((size for value in outputs for size in _sizes(value)), default=0)
        if len(sizes) > 1:
            return Counter({name: math.sqrt(sizes[0] * sizes[1] * max(out, 1))})
        return Counter({name: max([out, *sizes])})

    return handle


def _sizes(value: Any) -> list[int]:
    """Return the elements of a tensor, or of each tensor of a list."""
    if value.node().kind() in ("prim::ListConstruct", "prim::TupleConstruct"):
        return [size for item in value.node().inputs() for size in _sizes(item)]
    shape = get_shape(value)
    return [] if shape is None else [math.prod(shape)]


class TracedConvolutions(TorchFunctionMode):
    """``conv1d``, also that of ``nn.Conv1d``, becomes the operator that is traced."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return (_conv1d if func is torch.conv1d else func)(*args, **(kwargs or {}))


def _conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Compute ``torch.conv1d`` with the operator that is traced."""
    if isinstance(padding, str):
        raise UserError(f"conv1d with padding={padding!r} is not counted: give the number of positions")
    stride, padding, dilation = ([value] if isinstance(value, int) else value for value in (stride, padding, dilation))
    settings = (False, False, False, False)  # of cuDNN, for tensors on GPUs
    return torch._convolution(input, weight, bias, stride, padding, dilation, False, [0], groups, *settings)
