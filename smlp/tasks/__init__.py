"""Tasks for fairseq, which looks into this folder before it looks into ``models``."""

import smlp.models  # noqa: F401  the remedies for fairseq come first
