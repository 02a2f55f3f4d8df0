"""Hidden features of trained image models, and their CKA (Hayase and Karakida, 2024, Figure 2 and section C.1)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from smlp.errors import UserError
from smlp.vision.checkpoints import image_config
from smlp.vision.data import evaluation_loader, open_split
from smlp.vision.evaluate import model_of
from smlp.vision.model import ImageGatedBlock, ImageModel, MixerBlock, SparseLayerBlock
from smlp.wide_sparse.cka import Branch, compare_models, output_alone


def branches(model: ImageModel) -> dict[str, Branch]:
    """Return where the features that are added to skip connections come from, in order.

    An RP-Mixer permutes them before it adds them. That is left out: CKA does not depend on the order of features.
    """
    found: dict[str, Branch] = {}
    for index, block in enumerate(model.blocks):
        if isinstance(block, MixerBlock):
            found |= {
                f"{index}.tokens": (block.mlp_tokens, output_alone),
                f"{index}.channels": (block.mlp_channels, output_alone),
            }
        elif isinstance(block, ImageGatedBlock):
            found[str(index)] = (block.mlp_channels, output_alone)
        elif isinstance(block, SparseLayerBlock):
            found[str(index)] = (
                (block.layer, _activated(block.activation)) if block.out is None else (block.out, output_alone)
            )
    return found


def _activated(activation: Callable[[Tensor], Tensor]) -> Callable[[object, Tensor], Tensor]:
    return lambda inputs, output: activation(output)


def compare_checkpoints(
    first: str, second: str, data_dir: str, split: str, batch_size: int, batches: int | None = None
) -> dict[str, Any]:
    """Return the CKA of the branches of two trained models on the same images; the last, smaller batch is left out.

    The images come in one random order, always the same: the folder has them class by class.

    Returns:
        ``first`` and ``second``, names of branches; ``cka``, a row for each of the first; ``images``.

    Raises:
        UserError: a checkpoint is none of ours, the models' images differ, or there is no whole batch.
    """
    models, configs = [], []
    for path in (first, second):
        args = Namespace(checkpoint=path, model=None, num_classes=None, img_size=None, in_chans=None, model_kwargs={})
        args.__dict__.update(mean=None, std=None, crop_pct=None, interpolation="", no_ema=False, device_modules=None)
        model = model_of(args).eval()
        if not isinstance(model, ImageModel):
            raise UserError(f"{path} is of timm's {args.model}; CKA compares branches of smlp_* models")
        models.append(model)
        configs.append((args, image_config(args, model)))
    (args, config), (_, other) = configs
    if config["input_size"] != other["input_size"]:
        sizes = [" x ".join(map(str, one["input_size"])) for one in (config, other)]
        raise UserError(f"{first} and {second} must take the same images, got {sizes[0]} and {sizes[1]}")
    if different := [name for name in ("crop_pct", "crop_mode", "interpolation") if config[name] != other[name]]:
        name = different[0]
        raise UserError(f"{first} and {second} must take the same images: {name} is {config[name]} and {other[name]}")
    models[1].register_forward_pre_hook(_normalised_for(other, config))
    dataset = open_split(data_dir, split, args.classes, config["input_size"][0])
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()
    dataset.reader.samples = [dataset.reader.samples[place] for place in order]
    args.__dict__.update(batch_size=batch_size, validation_batch_size=None, workers=0, distributed=False)
    loader = islice(evaluation_loader(dataset, args, config, torch.device("cpu")), batches)
    whole = (images for images, _ in loader if len(images) == batch_size)
    found = compare_models(models, [branches(model) for model in models], whole, (first, second))
    if not found["inputs"]:
        raise UserError(f"{data_dir} has {len(dataset)} images in {split}, less than --batch-size {batch_size}")
    found["images"] = found.pop("inputs")
    return found


def _normalised_for(config: dict[str, Any], given: dict[str, Any]) -> Callable[..., tuple[Tensor]]:
    """Return a hook that takes images in the normalisation of ``given`` to that of ``config``, of a model's data."""
    channels = config["input_size"][0]
    mean, std, given_mean, given_std = (
        torch.tensor(values if len(values) == channels else [sum(values) / len(values)]).view(1, -1, 1, 1)
        for one in (config, given)
        for values in (one["mean"], one["std"])  # timm takes the average for images of other channels
    )
    return lambda module, inputs: (((inputs[0] * given_std + given_mean) - mean) / std,)
