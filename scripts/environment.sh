# Sourced by the other scripts: makes the virtual environment, and runs steps with one log each.
#
#   run_step NAME COMMAND...      runs a command with its output in $LOG_DIR/NAME.log; on failure names step and log
#   static_checks                 format, lint and types
#   make_environment EXTRAS       .venv with this package and its pinned dependencies; skipped when it is up to date
#
# PYTHON=/path/to/python3.12 chooses an interpreter, TORCH_INDEX=URL an index with torch's CPU build.

ROOT="$(CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
LOG_DIR="$ROOT/runs/logs"
VERSION_CHECK='import sys; assert (3, 11) <= sys.version_info[:2] <= (3, 12)'

fail() {
    echo "smlp: error: $1" >&2
    exit 1
}

run_step() {
    local name="$1" log="$LOG_DIR/$1.log"
    shift
    mkdir -p "$LOG_DIR"
    if ! "$@" >"$log" 2>&1; then
        fail "step '$name' failed, see $log (last line: $(grep -v '^ *$' "$log" | tail -n 1))"
    fi
}

static_checks() {
    "$VENV/bin/ruff" check . || fail "lint failed: run .venv/bin/ruff check ."
    "$VENV/bin/ruff" format --check . || fail "formatting failed: run .venv/bin/ruff format ."
    "$VENV/bin/python" -m mypy || fail "types failed: run .venv/bin/python -m mypy"
}

find_python() {
    local candidate candidates=(python3 python3.12 python3.11)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c "$VERSION_CHECK; import venv, ensurepip" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or 3.12 with venv is needed; found $("${candidates[0]}" --version 2>/dev/null || echo none). Name one with PYTHON=/path/to/python3.12"
}

make_environment() {
    local extras="$1" python stamp wanted
    stamp="$VENV/.installed-${extras//,/-}"
    wanted="$(cat "$ROOT/setup.py" "$ROOT/pyproject.toml" "$ROOT"/requirements/*.txt | cksum)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        echo "environment: .venv is up to date, skipped"
        return
    fi
    python="$(find_python)"
    if ! "$VENV/bin/python" -c "$VERSION_CHECK; import pip" 2>/dev/null; then
        # missing, incomplete after an interruption, or of an unsupported Python
        run_step venv "$python" -m venv --clear "$VENV"
    fi
    echo "environment: installing into .venv ($("$VENV/bin/python" --version)), about a minute"
    if [ -z "${TORCH_INDEX:-}" ] && [ "$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
        echo "environment: there is no NVIDIA GPU here; TORCH_INDEX can avoid downloading CUDA (gigabytes), see README.md"
    fi
    if [ -n "${TORCH_INDEX:-}" ]; then
        run_step install-torch "$VENV/bin/python" -m pip install --extra-index-url "$TORCH_INDEX" \
            -c "$ROOT/requirements/constraints.txt" "$(grep '^torch==' "$ROOT/requirements/constraints.txt")+cpu"
    fi
    run_step install-fairseq "$VENV/bin/python" -m pip install --no-deps --require-hashes -r "$ROOT/requirements/fairseq.txt"
    run_step install "$VENV/bin/python" -m pip install -c "$ROOT/requirements/constraints.txt" -e "$ROOT[$extras]"
    echo "$wanted" >"$stamp"
}
