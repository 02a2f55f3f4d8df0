"""Import timm, or say in one sentence what is missing.

torchvision's wheels from PyPI are built for CUDA. Next to a torch without CUDA their compiled part does not load, and
``import torchvision``, which timm needs, fails because two of its operators do not exist. timm's models, transforms and
loaders use neither, so :func:`import_timm` declares the two (their signatures alone, without any implementation) and
imports again. A torchvision whose compiled part loads is left alone.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from smlp.errors import UserError

EXTRA = 'images need timm and torchvision: pip install "smlp[vision]"'
_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_MISSING = "operator torchvision::nms does not exist"
#: declared operators last as long as the object that declared them
_declared: list[torch.library.Library] = []


def import_timm() -> ModuleType:
    """Return the module ``timm``.

    Raises:
        UserError: it is not installed, or does not fit the installed torch and torchvision.
    """
    try:
        try:
            return importlib.import_module("timm")
        except RuntimeError as error:
            if _declared or str(error) != _MISSING:
                raise
            _declared.append(torch.library.Library("torchvision", "FRAGMENT"))
            for name in ("nms", "qnms"):
                _declared[0].define(name + _NMS)
            return importlib.import_module("timm")
    except ModuleNotFoundError as error:
        raise UserError(f"{EXTRA} (there is no {error.name})") from None
    except (ImportError, RuntimeError) as error:
        raise UserError(f"timm cannot be imported ({error}): install torch and torchvision that fit together") from None
