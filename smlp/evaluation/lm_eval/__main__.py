"""The harness's own command line, to which the model ``smlp`` is known: ``python -m smlp.evaluation.lm_eval run ...``."""

import lm_eval.models  # noqa: F401  # the harness registers its own models only where there is none
from lm_eval.__main__ import cli_evaluate

import smlp.evaluation.lm_eval.model  # noqa: F401

if __name__ == "__main__":
    cli_evaluate()
