"""Find this package's decoder or encoder in the models that fairseq passes around."""

from __future__ import annotations

from typing import Any

from smlp.nn.decoder import Decoder
from smlp.nn.encoder import Encoder


def core_of(model: Any) -> Decoder | Encoder | None:
    """Return the plain model inside one of this package's fairseq models; None for other models.

    The model may be wrapped for several ranks.
    """
    shell = getattr(model, "decoder", None) or getattr(model, "encoder", None)
    core = getattr(shell, "core", None)
    return core if isinstance(core, Decoder | Encoder) else None


def prefix_of(model: Any) -> int:
    """Return how many leading positions only choose experts and are not scored; 0 for other models."""
    core = core_of(model)
    return 0 if core is None else core.config.prefix_tokens
