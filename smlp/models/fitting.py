"""Refuse, in one sentence, tensors of a checkpoint that are of another vocabulary, context or size than the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from smlp.config import ModelConfig
from smlp.errors import UserError

#: endings of the names of spatial weights; their last axis is the context
_SPATIAL_WEIGHTS = (".heads.weight", ".experts.weight", ".gating.weight")


def check_fit(
    state: Mapping[str, Any],
    own: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    config: ModelConfig,
    strict: bool = True,
) -> None:
    """Refuse tensors of another vocabulary, context or size, and integers in place of real numbers.

    Args:
        state: the checkpoint's tensors, by name, with all experts.
        own: the model's tensors, by name.
        shapes: those of the model's tensors, by name, with all experts.
        config: of the model.
        strict: whether every name must be in both.

    Raises:
        UserError: they do not fit; one sentence says what to give instead.
    """
    different = sorted(shapes.keys() ^ state.keys())
    if strict and different:
        raise UserError(
            f"the checkpoint is of another architecture: {len(different)} parameters are in one of the two only, "
            f"the first being {different[0]}; give the --arch, --router, --feature-routing, --positions and "
            "numbers of layers that it was trained with"
        )
    for name, tensor in state.items():
        if name in own and own[name].is_floating_point() and not tensor.dtype.is_floating_point:
            raise UserError(f"the checkpoint is damaged: {name} has type {tensor.dtype}, not floats")
        if name not in shapes or shapes[name] == tensor.shape:
            continue
        theirs, ours = tuple(tensor.shape), tuple(shapes[name])
        if name.endswith(".core.embedding.weight") and theirs[0] != ours[0]:
            raise UserError(
                f"the checkpoint has a vocabulary of {theirs[0]} symbols but the dictionary has {ours[0]}: "
                "use the dict.txt that the checkpoint was trained with"
            )
        if name.endswith(_SPATIAL_WEIGHTS) and len(theirs) != len(ours):
            kind = "toeplitz" if len(theirs) == 2 else "full"
            raise UserError(f"the checkpoint was trained with --spatial-weights {kind}: give that option")
        if name.endswith(_SPATIAL_WEIGHTS) and theirs[-1] != ours[-1]:
            if config.is_bidirectional and len(ours) == 2:  # a number for each of 2T-1 distances
                theirs, ours = (theirs[-1] // 2 + 1,), (ours[-1] // 2 + 1,)
            if config.prefix_tokens and ".feature_moe." in name:
                raise UserError(
                    f"the checkpoint predicts {theirs[-1]} positions of a sample, but a context of "
                    f"{config.max_tokens} with --prefix-fraction {config.prefix_fraction} asks for {ours[-1]} "
                    f"after a prefix of {config.prefix_tokens}"
                )
            other = "--max-positions" if config.is_bidirectional else "--max-target-positions"
            may_differ_by_start = not config.is_bidirectional and abs(theirs[-1] - ours[-1]) == 1
            more = " (--add-bos-token adds one)" if may_differ_by_start else ""
            raise UserError(
                f"the checkpoint has a context of {theirs[-1]} tokens but --tokens-per-sample or {other} asks for a "
                f"model of {ours[-1]}{more}"
            )
        if name.endswith(".core.positions") and theirs[0] != ours[0]:
            raise UserError(f"the checkpoint has positions for {theirs[0]} tokens, and this run asks for {ours[0]}")
        is_of_experts = ".experts." in name or name.endswith((".router.centroids", ".router.weight"))
        if is_of_experts and theirs[0] != ours[0] and theirs[1:] == ours[1:]:
            raise UserError(f"the checkpoint has {theirs[0]} experts in a layer but --num-experts asks for {ours[0]}")
        if name.endswith(".heads.weight") and theirs[0] != ours[0] and theirs[1:] == ours[1:]:
            raise UserError(f"the checkpoint has {theirs[0]} heads in a layer but --num-heads asks for {ours[0]}")
        raise UserError(f"the checkpoint does not fit the model: {name} has shape {theirs}, the model needs {ours}")
