"""Gradients of experts, and the norm of all gradients.

Scale. A rank's loss is a sum over its own tokens, and the loss of an update is the sum over ranks (what a trainer
divides it by afterwards, it divides all gradients by). The backward pass through the all-to-all leaves in each expert's
gradient the sum over the ranks of its expert group already, for the tokens of all of them passed through it. What is
missing is the sum over the other expert groups, that is, over the replica group. There is no factor W, P or W/P. With
P = 1 experts are reduced like dense parameters, whose gradients are summed over all ranks.

A trainer that averages dense gradients over W ranks (and multiplies by W later) must divide the expert gradients of
this module by W as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from smlp.parallel.group import Group
from smlp.parallel.ranks import Ranks
from smlp.parallel.spans import REDUCTION, span

#: approximate size of the pieces in which gradients are reduced
_BUCKET_BYTES = 2**25


def reduce_expert_gradients(parameters: Iterable[nn.Parameter], replicas: Group) -> None:
    """Sum the gradients of expert parameters over the ranks that hold the same experts, in place.

    A collective over ``replicas``; a parameter without a gradient counts as one with zeros, and gets one.
    """
    if replicas.size == 1:
        return
    parameters = list(parameters)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    with torch.no_grad(), span(REDUCTION):
        for bucket in _buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
            flat = torch.cat([grad.flatten() for grad in bucket])
            replicas.all_reduce(flat, "expert gradients")
            for grad, summed in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(summed.view_as(grad))


def _buckets(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group consecutive gradients of the same dtype and device."""
    bucket: list[Tensor] = []
    num_bytes = 0
    for grad in grads:
        same = not bucket or (grad.dtype, grad.device) == (bucket[0].dtype, bucket[0].device)
        if not same or num_bytes >= _BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(grad)
        num_bytes += grad.numel() * grad.element_size()
    if bucket:
        yield bucket


def global_grad_norm(
    dense_parameters: Iterable[nn.Parameter], expert_parameters: Iterable[nn.Parameter], ranks: Ranks
) -> Tensor:
    """Return the 2-norm of the gradient of the whole model: dense parameters once, each expert once.

    A collective over all ranks, after gradients were reduced. Every rank gets the same number, bit for bit; an inf or
    NaN anywhere makes it inf or NaN everywhere. Dense gradients that differ between ranks count with their mean square.

    Returns:
        A scalar, float64.
    """
    dense, experts = list(dense_parameters), list(expert_parameters)
    device = next((parameter.device for parameter in (*dense, *experts)), torch.device("cpu"))
    with span(REDUCTION):
        square = _square_norm(dense, device) / ranks.world.size + _square_norm(experts, device) / ranks.replicas.size
        return ranks.world.all_reduce(square, "gradient norm").sqrt()


def _square_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    grads = [parameter.grad.detach() for parameter in parameters if parameter.grad is not None]
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        wide = torch.promote_types(grad.dtype, torch.float32)
        total += torch.linalg.vector_norm(grad, dtype=wide).double().square()
    return total
