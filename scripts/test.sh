#!/usr/bin/env bash
# Sets up .venv with the test extras and runs the tests; arguments go to pytest:
#
#   bash scripts/test.sh                    format, lint, types and the default suite, on all cores
#   bash scripts/test.sh --all              also the slow tests: those of scripts/ and of README's commands
#   bash scripts/test.sh -k routing -x      some of them
#   bash scripts/test.sh --large            instead: 2 GB through every step of smlp data, each process within 1 GiB: half
#                                           an hour on two cores, 8 GB of disk; prints each step's memory and time
#   bash scripts/test.sh --slurm            instead: jobs on a real Slurm, which it installs (Debian, as root) and starts on
#                                           this machine; if that is impossible, status 0 and the reason
#   bash scripts/test.sh --wheel            instead: README's commands with the wheel in an empty environment: two minutes,
#                                           1.4 GB of disk; without a package index, status 0 and the reason
#
# Safe to run twice. Fails if no test ran.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

if [ "${1:-}" = --slurm ]; then
    shift
    status=0
    reason="$(bash "$ROOT/tests/helpers/slurm/install.sh")" || status=$?
    if [ "$status" -eq 3 ]; then
        echo "slurm tests skipped: $reason"
        exit 0
    fi
    [ "$status" -eq 0 ] || fail "installing Slurm failed"
    set -- -m slurm tests/launch/test_slurm.py "$@"
fi
if [ "${1:-}" = --large ]; then
    shift
    set -- -m large -s tests/data_prep/test_data_memory.py "$@"
fi
make_environment "test"
cd "$ROOT"
if [ "${1:-}" = --wheel ]; then
    shift
    found="$(timeout 120 "$VENV/bin/python" -m pip install --dry-run --ignore-installed --no-deps --require-hashes \
        -r requirements/fairseq.txt 2>&1)" || {
        grep -Eq 'No matching distribution|[Cc]onnect|timed out' <<<"$found" || [ -z "$found" ] || fail "wheel: $found"
        echo "wheel test skipped, no package index: $(tail -n 1 <<<"$found")"
        exit 0
    }
    set -- -m wheel tests/scripts/test_readme.py "$@"
fi
if [ "$#" -eq 0 ] || [ "$*" = --all ]; then
    static_checks
    # tests of one file share their fixtures, so they stay together; files marked as long come first
    set -- ${1:+-m "not large and not slurm and not wheel"} --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
fi
# One thread for each process: tests start several at a time, and results do not depend on the number of cores.
export OMP_NUM_THREADS=1
report="$(mktemp)"
trap 'rm -f "$report"' EXIT
"$VENV/bin/python" -m pytest --junit-xml="$report" "$@" || fail "tests failed"
[ -s "$report" ] || exit 0 # pytest only printed something, such as --help
# pytest fails if no test was collected, unless it only lists them; this catches a run in which every test was skipped.
"$VENV/bin/python" - "$report" <<'PYTHON' || fail "nothing ran: every collected test was skipped"
import sys
import xml.etree.ElementTree as ElementTree

suites = ElementTree.parse(sys.argv[1]).getroot().iter("testsuite")
counts = [(int(suite.get("tests")), int(suite.get("skipped"))) for suite in suites]
sys.exit(0 < sum(tests for tests, _ in counts) <= sum(skipped for _, skipped in counts))
PYTHON
