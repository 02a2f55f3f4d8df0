"""Finding this package's decoder in what fairseq hands around."""

from __future__ import annotations

from typing import Any

from smlp.nn.decoder import Decoder


def core_of(model: Any) -> Decoder | None:
    """The plain decoder inside one of this package's fairseq models, wrapped for several ranks or not; None for other
    models."""
    core = getattr(getattr(model, "decoder", None), "core", None)
    return core if isinstance(core, Decoder) else None


def prefix_of(model: Any) -> int:
    """The number of leading positions that only choose experts and are not scored; 0 for other models."""
    core = core_of(model)
    return 0 if core is None else core.config.prefix_tokens
