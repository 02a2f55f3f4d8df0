"""Centred kernel alignment (CKA) of hidden features, in mini-batches with the unbiased HSIC.

Sources: Nguyen et al., 2021, section 3.1, equations 2 and 3; Hayase and Karakida, 2024, section 3.4. Letters: ``B``
inputs of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from smlp.config.settings import require
from smlp.errors import UserError

#: a module, and a function of its inputs and output that gives the features that are added to a skip connection
Branch = tuple[nn.Module, Callable[[Any, Any], Tensor]]
Branches = Mapping[str, Branch]


def gram(features: Tensor) -> Tensor:
    """Return the products of the features of all pairs of inputs, (B, B) float64, with zeros on the diagonal.

    Features are taken relative to those of the first input. HSIC does not depend on it, and features that are the same
    for every input then give exact zeros instead of what rounding leaves.
    """
    x_Bf = features.detach().flatten(1).double()
    x_Bf = x_Bf - x_Bf[:1]
    return (x_Bf @ x_Bf.t()).fill_diagonal_(0)


def hsic(k_BB: Tensor, l_BB: Tensor) -> Tensor:
    """Return the unbiased estimate of HSIC from two matrices of :func:`gram`; B is at least 4."""
    size = len(k_BB)
    trace = (k_BB * l_BB).sum()
    both = k_BB.sum() * l_BB.sum() / ((size - 1) * (size - 2))
    crossed = 2 * (k_BB.sum(0) * l_BB.sum(0)).sum() / (size - 2)
    return (trace + both - crossed) / (size * (size - 3))


class MiniBatchCKA:
    """CKA of every layer of one model with every layer of another, gathered over batches.

    HSIC is averaged over the batches before the quotient is taken, so that the result hardly depends on their size.
    """

    def __init__(self) -> None:
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
        """Add the features of a batch: a tensor (B, ...) for each layer.

        Raises:
            UserError: a batch has fewer than four inputs, or the numbers of inputs differ.
        """
        sizes = {len(features) for features in (*first, *second)}
        require(len(sizes) == 1, f"CKA compares features of the same inputs, got batches of {sorted(sizes)}")
        require(min(sizes) >= 4, f"CKA needs batches of at least 4 inputs, got {min(sizes)}")
        one, two = ([gram(features) for features in layers] for layers in (first, second))
        new = (
            torch.stack([torch.stack([hsic(k, other) for other in two]) for k in one]),
            torch.stack([hsic(k, k) for k in one]),
            torch.stack([hsic(k, k) for k in two]),
        )
        if self._sums is None:
            self._sums = new
            return
        shapes = [tuple(total.shape) for total in self._sums], [tuple(value.shape) for value in new]
        require(shapes[0] == shapes[1], f"CKA has {shapes[0][0]} pairs of layers, and a batch has {shapes[1][0]}")
        for total, value in zip(self._sums, new, strict=True):
            total.add_(value)

    def matrix(self) -> Tensor:
        """Return the CKA of each pair of layers, (layers of the first, layers of the second).

        Raises:
            UserError: there was no batch.
        """
        if self._sums is None:
            raise UserError("CKA needs at least one whole batch of inputs")
        crossed, one, two = self._sums
        return crossed / (one.unsqueeze(1) * two).sqrt()


def output_alone(inputs: Any, output: Tensor) -> Tensor:
    """Return the features of a :data:`Branch` whose module's output is what is added."""
    return output


@contextmanager
def recorded(branches: Branches) -> Iterator[list[Tensor]]:
    """Gather the features of the branches in the forward passes inside the ``with``, in the order of execution."""
    features: list[Tensor] = []

    def gather(function: Callable[[Any, Any], Tensor]) -> Callable[..., None]:
        return lambda module, inputs, output: features.append(function(inputs, output))

    handles = [module.register_forward_hook(gather(function)) for module, function in branches.values()]
    try:
        yield features
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def compare_models(
    models: Sequence[nn.Module], branches: Sequence[Branches], batches: Iterable[Tensor], names: Sequence[str]
) -> dict[str, Any]:
    """Return the CKA of the branches of two models on the same inputs.

    Args:
        models: both of them.
        branches: of each, in the order of execution.
        batches: inputs of the models.
        names: of the models, for messages.

    Returns:
        ``first`` and ``second``, names of branches; ``cka``, a row for each of the first; ``inputs``, their number.

    Raises:
        UserError: the features of a branch have no CKA.
    """
    cka, seen = MiniBatchCKA(), 0
    for inputs in batches:
        with recorded(branches[0]) as one, recorded(branches[1]) as two:
            for model in models:
                model(inputs)
        cka.add(one, two)
        seen += len(inputs)
    first, second = (list(own) for own in branches)
    matrix = cka.matrix() if seen else torch.zeros(0, 0)
    if not matrix.isfinite().all():
        one, two = (~matrix.isfinite()).nonzero()[0].tolist()
        raise UserError(
            f"branch {first[one]} of {names[0]} and {second[two]} of {names[1]} have no CKA: the features of one are "
            "no finite numbers, or are the same for every input"
        )
    return {"first": first, "second": second, "cka": matrix.tolist(), "inputs": seen}
