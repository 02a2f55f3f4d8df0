#!/usr/bin/env bash
# Trains examples/compare/one_gpu.yaml and writes its report. It needs the data that the file names.
#
#   bash scripts/gpu/compare.sh [--device cpu] [--out DIR] [--minutes M] [--only STEP ...]
#
# In steps that are resumable; scripts/gpu/steps.py says more. PYTHON chooses the interpreter (default: .venv's, or python3).
set -euo pipefail
ROOT="$(CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
[ -x "$ROOT/.venv/bin/python" ] && DEFAULT="$ROOT/.venv/bin/python" || DEFAULT=python3
exec "${PYTHON:-$DEFAULT}" "$ROOT/scripts/gpu/steps.py" compare "$@"
