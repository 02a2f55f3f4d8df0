"""Find this package's decoder in the models that fairseq passes around."""

from __future__ import annotations

from typing import Any

from smlp.nn.decoder import Decoder


def core_of(model: Any) -> Decoder | None:
    """Return the plain decoder inside one of this package's fairseq models; None for other models.

    The model may be wrapped for several ranks.
    """
    core = getattr(getattr(model, "decoder", None), "core", None)
    return core if isinstance(core, Decoder) else None


def prefix_of(model: Any) -> int:
    """Return how many leading positions only choose experts and are not scored; 0 for other models."""
    core = core_of(model)
    return 0 if core is None else core.config.prefix_tokens
