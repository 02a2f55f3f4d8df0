"""smlp: sparse all-MLP language models.

Importing this package is cheap and registers nothing. ``fairseq-train --user-dir smlp`` finds the architectures in
``smlp.models``; Python users call :func:`build` and :func:`load_pretrained`.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Public names and their modules; resolved on first use, so that `import smlp` loads no torch.
_LAZY = {
    "ModelConfig": "smlp.config",
    "MoEConfig": "smlp.config",
    "UserError": "smlp.errors",
    "PRESETS": "smlp.config.presets",
    "preset": "smlp.config.presets",
    "build": "smlp.nn.build",
    "load_pretrained": "smlp.checkpoint.load",
    "generate": "smlp.inference.generation",
}

__all__ = ["__version__", "ops", *_LAZY]


def __getattr__(name: str) -> Any:
    if name == "ops":
        return importlib.import_module("smlp.ops")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'smlp' has no attribute {name!r}")
