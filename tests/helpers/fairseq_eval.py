"""Runs ``fairseq-eval-lm`` several times in one process, for the price of one start.

Reads a JSON list of pairs from standard input: a command line, and the checkpoints to evaluate with it. The last line
of its standard output is a JSON list with, for each of them, the loss (base 2) that fairseq's function returns and the
number of tokens that it logs.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import sys

from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import eval_lm


class Counted(logging.Handler):
    """Keeps the number of tokens in fairseq's log."""

    num_tokens = 0

    def emit(self, record: logging.LogRecord) -> None:
        found = re.match(r"Evaluated ([\d,]+) tokens", record.getMessage())
        if found:
            self.num_tokens = int(found[1].replace(",", ""))


def main() -> None:
    counted, results = Counted(), []
    logging.getLogger("fairseq_cli.eval_lm").addHandler(counted)
    for words, checkpoints in json.load(sys.stdin):
        # half a second each time
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_eval_lm_parser(), words))
        for path in checkpoints:
            own = copy.deepcopy(cfg)
            own.common_eval.path = path
            results.append((float(eval_lm.main(own)["loss"]), counted.num_tokens))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
