"""What kinds of routers and of blocks have in common."""

from __future__ import annotations

from abc import ABC
from typing import ClassVar

from smlp.config import ModelConfig


class Kind(ABC):
    """A part that a model can be made of. Register a subclass under a name; it is made without arguments."""

    #: under which it is registered
    name: ClassVar[str]
    #: frozen dataclass of the settings that it brings along, made with :func:`smlp.config.settings.setting`; a field
    #: F is the model's setting ``NAME_F`` and fairseq's option ``--NAME-F``; ``config.own(NAME)`` returns the object
    settings: ClassVar[type | None] = None

    def check(self, config: ModelConfig) -> None:  # noqa: B027  most have nothing to refuse
        """Refuses a model whose settings do not go with this part.

        Raises:
            UserError: one sentence that names the settings and the numbers.
        """

    def auxiliary_loss(self, config: ModelConfig) -> str | None:
        """What the auxiliary losses that it returns are, for a message; None if it returns none in training."""
        return None
