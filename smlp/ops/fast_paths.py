"""Choose between fast paths and obvious ones, from measured ranges, all in this file (docs/performance.md).

``SMLP_REFERENCE_OPS=1`` in the environment takes the obvious path everywhere.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from smlp.errors import UserError
from smlp.ops import onednn

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: positions in a strip of a causal product; each strip's block on the diagonal is computed in full
TRIANGLE_STRIP = 128
#: multiplications of a causal product, with the empty half, from which a GPU computes it by Triton's kernels: below,
#: torch's products are launched in less time
FUSED_MULTIPLICATIONS = 2**33
#: of which the features of a head are a multiple there: otherwise Triton loads numbers one by one, and takes 4 times as
#: long as torch
FUSED_WIDTH = 16
#: dtypes in which these kernels are faster than torch's products
FUSED_DTYPES = (torch.bfloat16, torch.float16)
#: most bands of rows into which a matrix is cut to multiply it with few vectors, on a CPU
BANDS = 16
#: number of scores from which their product with a vector is taken by bands, on a CPU
BANDED_SCORES = 2**20
#: numbers in these vectors up to which bands are faster, unless it is a single vector
BANDED_INPUTS = 4096
#: multiplications of a product from which oneDNN is faster than MKL, on CPUs where it ever is
ONEDNN_MULTIPLICATIONS = 2**22
#: experts with tokens from which, and multiplications in a product of one of them up to which, a CPU computes all but
#: the products of all experts at once
SMALL_EXPERTS = 4
SMALL_EXPERT_MULTIPLICATIONS = 2**20
#: most tokens of an expert at a time, where experts are computed one after the other: intermediate results then stay
#: in a CPU's cache
TOKENS_AT_A_TIME = 4096
#: rows of experts with padding, as a multiple of their tokens, up to which a GPU computes all experts at once
MOST_PADDING = 4
#: multiplications in a product of one of them, on the average, up to which it does
PADDED_MULTIPLICATIONS = 2**30
#: logits whose probabilities are computed at a time: what a CPU's cache holds, and enough to keep a GPU busy
LOGITS_AT_A_TIME = {"cpu": 2**20, "cuda": 2**26}
#: scores up to which a balanced assignment is repaired to the optimum
EXACT_SCORES = 2**14

_reference_only: ContextVar[bool] = ContextVar(
    "reference_only", default=os.environ.get("SMLP_REFERENCE_OPS", "0") not in ("", "0")
)


@contextlib.contextmanager
def reference_ops() -> Iterator[None]:
    """Take the obvious paths inside the block."""
    token = _reference_only.set(True)
    try:
        yield
    finally:
        _reference_only.reset(token)


def is_traced() -> bool:
    """Return whether torch turns this code into a graph or transforms it (compile, export, torch.func).

    Code cannot branch on values of tensors then, and fast paths with gradients by hand have no place.
    """
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def needs_fixed_shapes() -> bool:
    """Return whether no shape may depend on values: in ``torch.export`` and ``torch.func.vmap``."""
    if torch.compiler.is_exporting():
        return True
    levels = torch._C._functorch.get_interpreter_stack() if not torch.compiler.is_compiling() else None
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels or ())


def sizes_may_depend_on_values() -> bool:
    """Return whether this code is compiled to a graph in which a tensor's size may depend on values."""
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    return bool(torch._dynamo.config.capture_dynamic_output_shape_ops)


def outside_graphs(function: _Function) -> _Function:
    """Keep a function out of the graphs of ``torch.compile``, which then break there; a decorator.

    torch's own ``torch.compiler.disable`` would load its compiler, and Triton, for everybody.
    """
    disabled = torch._disable_dynamo(function)  # type: ignore[attr-defined]

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(_Function, chosen)


def add_operator(signature: str, function: Callable[..., Any], shapes: Callable[..., Any]) -> str:
    """Make a function a single operator in graphs, which need not know the values on which its steps depend.

    Args:
        signature: name, arguments and results, as torch writes them.
        function: what it computes, without gradients.
        shapes: returns empty results of the right shapes.

    Returns:
        The name.
    """
    name = signature.partition("(")[0]
    torch.library.define(name, signature.removeprefix(name))
    torch.library.impl(name, "CompositeExplicitAutograd", function)
    torch.library.register_fake(name, shapes)
    return name


def _only_obvious() -> bool:
    """Return whether the obvious paths are asked for, or a graph is made, which torch makes fast itself."""
    return is_traced() or _reference_only.get()


def allowed(*tensors: Tensor) -> bool:
    """Return whether a fast path may be taken at all: not for mixed dtypes (autocast)."""
    first = tensors[0]
    return (
        not _only_obvious()
        and not first.is_meta  # which has no autocast to ask about
        and all(tensor.dtype == first.dtype for tensor in tensors)
        and not torch.is_autocast_enabled(first.device.type)
    )


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let the backward pass of an autograd function refuse to be differentiated itself; a decorator.

    torch's own ``once_differentiable`` leaves out what would have passed through the function, without a word.

    Raises:
        UserError: in the backward pass, if it is recorded (``create_graph=True``).
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise UserError(
                "gradients of gradients need the reference code: run the forward pass inside smlp.ops.reference_ops()"
            )
        return backward(ctx, *gradients)

    return checked


def triangle_strip(num_tokens: int) -> int | None:
    """Return the positions in a strip of a causal product over so many; None where the product is taken whole."""
    return TRIANGLE_STRIP if num_tokens >= 2 * TRIANGLE_STRIP else None


def reads_in_place(x_Bnhc: Tensor, start: int) -> bool:
    """Return whether a spatial projection of the last positions reads each sequence in place.

    Copying all sequences together first takes longer on a CPU than the product.
    """
    return start > 0 and allowed(x_Bnhc) and x_Bnhc.size(0) > 0 and x_Bnhc.device.type == "cpu"


def takes_bands(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> bool:
    """Return whether a linear map uses a batched product of bands: for few rows on a CPU, without gradients."""
    if is_traced():  # before any size is compared, so that a graph holds for other sizes too
        return False
    given = (x, weight_OI) if bias_O is None else (x, weight_OI, bias_O)
    few = 0 < x.numel() <= max(weight_OI.size(1), min(BANDED_INPUTS, 4 * weight_OI.size(1)))
    return (
        few
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and weight_OI.size(0) % 2 == 0
        and weight_OI.is_contiguous()
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given))
        and allowed(*given)
        and not _recorded(given)
    )


def takes_onednn(num_multiplications: int, *tensors: Tensor) -> bool:
    """Return whether oneDNN computes a product of these tensors: a large one in float32, on a CPU where MKL is slow."""
    first = tensors[0]
    return (
        not is_traced()
        and num_multiplications >= ONEDNN_MULTIPLICATIONS
        and first.device.type == "cpu"
        and first.dtype == torch.float32
        and allowed(*tensors)
        and bool(torch.backends.mkldnn.enabled)
        and not _recorded(tensors)
        and onednn.faster_than_mkl()  # last: at the first use it computes
    )


def fuse(num_tokens: int, start: int, *tensors: Tensor) -> bool:
    """Return whether Triton's kernels compute a causal product over so many positions, all of them (start 0).

    False where torch's operators are recorded: operators that are traced or counted one by one (modes, subclasses of
    tensors, ``torch.jit.trace``, ``torch.compile``) must be torch's own.
    """
    first = tensors[0]
    return (
        runs_triton(first.device)
        and not _recorded(tensors)
        and start == 0
        and first.numel() * num_tokens >= FUSED_MULTIPLICATIONS
        and first.size(-1) % FUSED_WIDTH == 0
        and first.dtype in FUSED_DTYPES
        and allowed(*tensors)
        and all(tensor.device == first.device for tensor in tensors)
    )


def runs_triton(device: torch.device) -> bool:
    """Return whether Triton is installed and the device is an NVIDIA GPU with the instructions that kernels need."""
    if device.type != "cuda" or torch.version.hip is not None or not _triton_is_installed():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None  # does not import it


def _recorded(tensors: tuple[Tensor, ...]) -> bool:
    """Return whether some mode records single operators and may know only those of torch.

    A mode that accepts any operator has the attribute ``any_operator``.
    """
    return (
        any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors)
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or torch.compiler.is_compiling()
        or any(not getattr(mode, "any_operator", False) for mode in _get_current_dispatch_mode_stack())
        or any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())
    )


def assign_exactly(num_tokens: int, num_experts: int) -> bool:
    """Return whether a balanced assignment is repaired to the optimum, which takes long where it is large."""
    return _only_obvious() or num_tokens * num_experts <= EXACT_SCORES or num_tokens < 4 * num_experts


def bands_of_tokens(weight_BNE: Tensor) -> int:
    """Return into how many bands an assignment's weights are cut by token for products with a vector; 1 for none."""
    num_problems, num_tokens, _ = weight_BNE.shape
    banded = num_problems == 1 and weight_BNE.device.type == "cpu" and weight_BNE.numel() >= BANDED_SCORES
    return math.gcd(num_tokens, BANDS) if banded and not _only_obvious() else 1


def loses_by_rows(logits_NV: Tensor) -> bool:
    """Return whether token losses are computed for a part of the positions at a time; False without positions."""
    return allowed(logits_NV) and logits_NV.numel() > 0 and not _recorded((logits_NV,))


def rows_of_logits(logits_NV: Tensor) -> int:
    """Return for how many positions at a time token losses are computed."""
    return max(1, LOGITS_AT_A_TIME["cuda" if logits_NV.is_cuda else "cpu"] // logits_NV.size(1))


def groups_products(x_AI: Tensor, num_hidden: int) -> bool:
    """Return whether experts with unequal numbers of tokens share one grouped product.

    torch has a kernel for bf16 only, and rows must be multiples of 16 bytes.
    """
    whole_rows = x_AI.size(1) % 8 == 0 and num_hidden % 8 == 0
    return x_AI.is_cuda and x_AI.dtype == torch.bfloat16 and whole_rows and hasattr(F, "grouped_mm")


def pads_experts(counts: Sequence[int], x_AI: Tensor, num_hidden: int) -> bool:
    """Return whether a GPU gives all experts as many rows as the busiest one has: if that is not many rows more, their
    products are not so large that a launch for each costs little, and there is no grouped product.
    """
    num_rows, num_experts = sum(counts), len(counts)
    padded = num_experts * max(counts, default=0)
    is_small = x_AI.numel() * num_hidden <= num_experts * PADDED_MULTIPLICATIONS
    fits = num_rows < padded <= MOST_PADDING * num_rows
    return x_AI.is_cuda and is_small and fits and not groups_products(x_AI, num_hidden)


def shares_small_experts(counts: Sequence[int], x_AI: Tensor, num_hidden: int) -> bool:
    """Return whether a CPU computes norms, activations and sums of all experts at once: where products are so small
    that the calls would take as long.

    Not with 16 bits, in which such sums would be rounded after each token.
    """
    num_busy = sum(count > 0 for count in counts)
    is_small = x_AI.numel() * num_hidden <= num_busy * SMALL_EXPERT_MULTIPLICATIONS
    return x_AI.device.type == "cpu" and x_AI.dtype.itemsize >= 4 and num_busy >= SMALL_EXPERTS and is_small


def draws_own_masks(x: Tensor) -> bool:
    """Return whether dropout draws its mask itself instead of leaving it to torch, which is fast on a GPU only."""
    return not _only_obvious() and x.device.type == "cpu"


def skips_dropped(x: Tensor) -> bool:
    """Return whether a residual branch is computed only for the samples that keep it; a GPU would wait for their
    number."""
    return x.device.type == "cpu" and not _only_obvious()


def fuses_adam(parameters: Iterable[Tensor]) -> bool:
    """Return whether one kernel updates these parameters: all in float32 on CPUs and GPUs, and so their gradients,
    which lie in memory as they do."""
    return not _only_obvious() and all(
        value.device.type in ("cpu", "cuda")
        and value.dtype == torch.float32
        and value.layout == torch.strided
        and value.stride() == parameter.stride()
        for parameter in parameters
        for value in (parameter, parameter.grad)
        if value is not None
    )
