"""Registration with fairseq, which imports this package for ``--user-dir smlp``. It only translates arguments."""

from smlp import fairseq_compat

fairseq_compat.apply()

from smlp.criterions import moe_cross_entropy, span  # noqa: E402  fairseq does not look into criterions/ itself
from smlp.models import encoder, language_model  # noqa: E402

__all__ = ["encoder", "language_model", "moe_cross_entropy", "span"]
