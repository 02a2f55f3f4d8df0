#!/usr/bin/env bash
# Checks for daily work, under two minutes once .venv exists: format, lint, types, and the fast tests.
#
#   bash scripts/check.sh            all of them
#   bash scripts/check.sh --fix      fixes what ruff can fix, first
#
# scripts/test.sh runs the same checks and every test.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
make_environment "test"
if [ "${1:-}" = --fix ]; then
    "$VENV/bin/ruff" check --fix --quiet . || true
    "$VENV/bin/ruff" format --quiet .
fi
static_checks
# Rooms whose tests are quick.
export OMP_NUM_THREADS=1
"$VENV/bin/python" -m pytest --quiet --numprocesses logical --maxprocesses 4 --dist loadfile \
    tests/config tests/nn tests/moe tests/ops tests/text || fail "tests failed"
