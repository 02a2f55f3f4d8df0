#!/usr/bin/env bash
# From a fresh machine to a trained sparse all-MLP language model: installs into .venv, builds real text, trains
# smlp_tiny and gmlp_lm_tiny through fairseq-train, evaluates and samples. About ten minutes on two cores.
#
#   bash scripts/quickstart.sh                           the English in this Python installation
#   bash scripts/quickstart.sh --text FILE... --out DIR  your own text
#   bash scripts/quickstart.sh --help                    all options
#
# Safe to run twice: what is there is skipped. PYTHON=/path/to/python3.12 chooses an interpreter. Without an NVIDIA
# GPU, TORCH_INDEX=<index with CPU builds of torch> saves gigabytes of download on Linux (see README.md).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment "plots"
export PYTHONPATH="$ROOT/scripts${PYTHONPATH:+:$PYTHONPATH}"
exec "$VENV/bin/python" "$ROOT/scripts/quickstart.py" "$@"
