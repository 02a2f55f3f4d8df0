"""Tests of images need timm, which imports torchvision."""

import torch

#: kept alive: operators are gone with the object that defined them
OPERATORS = torch.library.Library("torchvision", "FRAGMENT")

try:
    import torchvision  # noqa: F401
except RuntimeError:
    # PyPI's torchvision is built for CUDA: with torch's CPU build its library is not loaded, and the import fails where
    # it describes two of the operators in that library. No test calls them.
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
