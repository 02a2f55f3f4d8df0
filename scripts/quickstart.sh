#!/usr/bin/env bash
# Leads from a fresh machine to a trained sparse all-MLP language model: installs into .venv, prepares real text, trains
# smlp_hash_tiny and gmlp_lm_tiny through fairseq-train, evaluates them and generates text: about ten minutes on two
# cores.
#
#   bash scripts/quickstart.sh                           the English in this Python installation
#   bash scripts/quickstart.sh --text FILE... --out DIR  your own text
#   bash scripts/quickstart.sh --minutes 30              train for longer
#   bash scripts/quickstart.sh --help                    all options, once installed
#
# Safe to run twice: finished steps are skipped. PYTHON=/path/to/python3.12 chooses an interpreter. Without an NVIDIA
# GPU, TORCH_INDEX=<index with CPU builds of torch> saves gigabytes of download on Linux (see README.md).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case " $* " in
*" --help "* | *" -h "*)
    sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    "$VENV/bin/python" -c "import smlp, fairseq" 2> /dev/null || exit 0 # the options below need the installation
    ;;
*) make_environment "plots" ;;
esac
exec "$VENV/bin/python" "$ROOT/scripts/quickstart.py" "$@"
