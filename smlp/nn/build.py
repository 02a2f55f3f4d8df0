"""Build a model from its configuration or the name of its architecture."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from smlp.config import ModelConfig
from smlp.config.ignored_settings import ignored_settings
from smlp.config.presets import PRESETS, preset
from smlp.costs.memory import check_weights
from smlp.nn.decoder import Decoder
from smlp.nn.encoder import Encoder
from smlp.parallel import Ranks


def model_of(config: ModelConfig, ranks: Ranks | None = None) -> Decoder | Encoder:
    """Build the model that a configuration describes, a decoder or an encoder, with random weights.

    Args:
        config: of the whole model.
        ranks: who holds which experts; one process with all of them by default.

    Raises:
        UserError: ``ranks`` is for another number of experts.
    """
    return Encoder(config, ranks) if config.is_bidirectional else Decoder(config, ranks)


def build(arch: str, **overrides: Any) -> Decoder | Encoder:
    """Build a model with random weights for a named architecture.

    Args:
        arch: a name of :data:`smlp.config.presets.PRESETS`, such as ``"smlp_tiny"``.
        **overrides: settings by name: fields of ``ModelConfig`` and ``MoEConfig``, such as ``num_experts=4``, and those
            that plugins bring (docs/extending.md).

    Raises:
        UserError: the name or a setting is unknown, a value is out of range, or the weights take more memory than this
            machine has.
    """
    config = preset(arch, **overrides)
    for name, reason in ignored_settings(config, PRESETS[arch]).items():
        warnings.warn(f"{name} has no effect: {reason}", stacklevel=2)
    if torch.get_default_device().type == "cpu":
        check_weights(config)
    return model_of(config)


class _NothingDrawn(TorchFunctionMode):
    """Leaves tensors of the meta device as they are, where torch would import its compiler (1.2 s) to draw values."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.init.normal_ and kwargs["tensor"].is_meta:  # torch names the arguments
            return kwargs["tensor"]
        return func(*args, **kwargs)


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Inside the block, build models on the meta device: their parameters have shapes and types, but no values."""
    with torch.device("meta"), _NothingDrawn():
        yield
