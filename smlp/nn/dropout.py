"""Dropout as a module."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from smlp.errors import UserError
from smlp.ops import dropout


class Dropout(nn.Module):
    """:func:`smlp.ops.dropout` in training, nothing in evaluation.

    Args:
        probability: of an element to be set to zero.
    """

    #: whether it drops in evaluation too
    is_retained = False

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.probability) if self.training or self.is_retained else x

    def make_generation_fast_(
        self,
        name: str = "",
        retain_dropout: bool = False,
        retain_dropout_modules: Iterable[str] | None = None,
        **unused: object,
    ) -> None:
        """Called by fairseq before it generates, with its options ``--retain-dropout`` and ``-modules``.

        Raises:
            UserError: the dropout of some modules only is to be kept; they have no names here that could be given.
        """
        if retain_dropout and retain_dropout_modules is not None:
            raise UserError(
                f"--retain-dropout-modules {retain_dropout_modules}: the layers of this model have no such names; "
                "--retain-dropout alone keeps the dropout of all of them"
            )
        self.is_retained = retain_dropout

    def extra_repr(self) -> str:
        return f"probability={self.probability}"
