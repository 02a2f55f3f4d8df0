#!/usr/bin/env bash
# Measures what docs/performance.md and docs/benchmark_cpu.md have for CPUs, on a GPU.
#
#   bash scripts/gpu/benchmark.sh [--device cpu] [--out DIR] [--minutes M] [--only STEP ...]
#
# In steps that are resumable; scripts/gpu/steps.py says more. PYTHON chooses the interpreter (default: .venv's, or python3).
set -euo pipefail
ROOT="$(CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
[ -x "$ROOT/.venv/bin/python" ] && DEFAULT="$ROOT/.venv/bin/python" || DEFAULT=python3
exec "${PYTHON:-$DEFAULT}" "$ROOT/scripts/gpu/steps.py" benchmark "$@"
