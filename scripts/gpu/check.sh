#!/usr/bin/env bash
# Checks everything that a GPU changes: kernels and experts against float64, losses of every tiny architecture against
# the CPU's, half precision, recomputation, resuming, fully_sharded.
#
#   bash scripts/gpu/check.sh [--device cpu] [--out DIR] [--minutes M] [--only STEP ...]
#
# In steps that are resumable; scripts/gpu/steps.py says more. PYTHON chooses the interpreter (default: .venv's, or python3).
set -euo pipefail
ROOT="$(CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
[ -x "$ROOT/.venv/bin/python" ] && DEFAULT="$ROOT/.venv/bin/python" || DEFAULT=python3
exec "${PYTHON:-$DEFAULT}" "$ROOT/scripts/gpu/steps.py" check "$@"
