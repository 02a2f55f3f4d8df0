"""The harness's own command line with the model ``smlp``: ``python -m smlp.evaluation.lm_eval run --model smlp``."""

import sys

import lm_eval.models  # noqa: F401  # the harness registers its own models only where there is none
from lm_eval.__main__ import cli_evaluate

import smlp.evaluation.lm_eval.model  # noqa: F401
from smlp.errors import UserError, one_line

if __name__ == "__main__":
    try:
        cli_evaluate()
    except UserError as error:
        sys.exit(f"smlp: error: {one_line(error)}")
