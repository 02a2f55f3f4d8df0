"""fairseq registration, imported by fairseq itself for ``--user-dir smlp``: translates arguments, nothing more."""

from smlp.fairseq_compat import apply

apply()

from smlp.models import architectures  # noqa: E402

__all__ = ["architectures"]
