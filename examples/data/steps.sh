# Sourced by the recipes in this folder: parses their options and runs their steps.
#
#   bash examples/data/RECIPE.sh OUT [options]
#     --dry-run         checks sources, disk and packages, estimates time and cost, and rehearses all steps on a small
#                       text; asks no server and keeps nothing
#     --workers N       processes of a step (default: the cores of this machine)
#     --source SOURCE   instead of the recipe's corpora: another source of 'smlp data fetch'; may be given again
#     --tasks N         submits each step to Slurm as a job array of N tasks, --workers processes in each; options after
#                       -- are sbatch's: --tasks 32 --workers 16 -- --cpus-per-task 16 --mem 64G --time 24:00:00
#
# A recipe that is run again resumes. GPT2_BPE=DIR uses OpenAI's encoder.json and vocab.bpe from DIR instead of learning a
# vocabulary of the same kind; TASKS=DIR removes documents that overlap with the zero-shot tasks in DIR. SMLP replaces
# the command "smlp"; PRICE sets the estimate's price of a core hour (default 0.04).
set -euo pipefail

HERE="$(CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
SMLP="${SMLP:-smlp}"
out="" dry_run="" tasks="" workers="$(getconf _NPROCESSORS_ONLN)"
given=() sbatch_options=()
after="" # the job that the next one waits for

usage() {
    sed -n '/^#   bash/,/^set -/{/^set -/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
    exit 2
}

begin() {
    while [ "$#" -gt 0 ]; do
        case "$1" in
        --dry-run) dry_run=1 ;;
        --workers | --source | --tasks)
            [ "$#" -gt 1 ] || usage
            case "$1" in
            --workers) workers="$2" ;;
            --source) given+=("$2") ;;
            --tasks) tasks="$2" ;;
            esac
            shift
            ;;
        --)
            sbatch_options=("${@:2}")
            break
            ;;
        -*) usage ;;
        *)
            [ -z "$out" ] || usage
            out="$1"
            ;;
        esac
        shift
    done
    [ -n "$out" ] || usage
    local option
    for option in workers tasks; do
        if [ -n "${!option}" ] && ! [[ "${!option}" =~ ^[1-9][0-9]*$ ]]; then
            echo "smlp: error: --$option ${!option} is not a number of at least 1" >&2
            exit 1
        fi
    done
}

# rounds STEP: how often an array has to run, because later phases need the results of all tasks
rounds() {
    case "$1" in
    sample) echo 2 ;;
    dedup) echo 4 ;;
    tokenizer) echo 0 ;;
    *) echo 1 ;;
    esac
}

# step NAME OPTIONS...: runs a step here, or as jobs that begin when the previous ones have succeeded
step() {
    local name="$1" round
    shift
    local words=("$SMLP" data "$name" "$@" --workers "$workers")
    if [ -z "$tasks" ]; then
        echo "== ${words[*]}"
        "${words[@]}"
        return
    fi
    for ((round = 0; round < $(rounds "$name"); round++)); do
        submit "$name" --array="0-$((tasks - 1))" -- "${words[@]}" --share "@TASK@/$tasks"
    done
    submit "$name" -- "${words[@]}" # finishes the rest, and writes the manifest
}

# quoted WORDS...: one line for any shell; sbatch --wrap passes it to /bin/sh, which may not support $'...' of printf %q
quoted() {
    local word quote="'" escaped="'\\''" line=""
    for word in "$@"; do line+="'${word//$quote/$escaped}' "; done
    printf '%s' "$line"
}

# submit NAME SBATCH_OPTIONS... -- COMMAND...
submit() {
    local name="$1" own=() line
    local task="'\"\$SLURM_ARRAY_TASK_ID\"'" # ends the quotation around it, and begins it again
    shift
    while [ "$1" != -- ]; do
        own+=("$1")
        shift
    done
    shift
    line="$(quoted "$@")"
    line="${line//@TASK@/$task}"
    [ -z "$after" ] || own+=(--dependency="afterok:$after")
    local answer
    answer="$(sbatch --parsable --job-name "smlp-$name" "${sbatch_options[@]}" "${own[@]}" --wrap "$line")"
    # a site's sbatch may print notices, or leave out --parsable; with --clusters it adds the cluster
    after="$(sed -nE 's/^(Submitted batch job )?([0-9]+)((;| on cluster ).*)?$/\2/p' <<<"$answer" | tail -n 1)"
    if [ -z "$after" ]; then
        echo "smlp: error: sbatch took the job, but its number is not in: ${answer//$'\n'/ }" >&2
        exit 1
    fi
    echo "$after $name: $line"
}

# inspect BIN: the last step, which runs as one task
inspect() {
    local words=("$SMLP" data inspect "$1" --verify --json "$1/report.json")
    if [ -n "$tasks" ]; then submit inspect -- "${words[@]}"; else "${words[@]}"; fi
}

# small_or FULL SMALL: a size of the recipe, or that of the rehearsal
small_or() { if [ -n "${REHEARSAL:-}" ]; then echo "$2"; else echo "$1"; fi; }

# get SOURCES... OPTIONS...: documents of all sources
get() { step fetch "$@" --out "$out/fetched" --delete-downloads --compress zst; }

# folders SOURCES...: sets found to the folders that 'get' writes; the step itself tells their names
folders() {
    local names name
    found=()
    [ "$#" -gt 0 ] || return 0
    # fetch also exits with 1 if the disk is too small, which 'get' reports; there is no plan if a source is wrong
    names="$({ "$SMLP" data fetch "$@" --out "$out/fetched" --dry-run --json /dev/fd/3 3>&1 >/dev/null || true; } |
        python3 -c 'import json, sys
plan = sys.stdin.read() or sys.exit(1)
for row in json.loads(plan)["sources"]:
    print(row["name"])')"
    while read -r name; do found+=("$out/fetched/$name"); done <<<"$names"
}

# clean_and_dedup FOLDERS...: clean documents without duplicates, in OUT/unique
clean_and_dedup() {
    local rules=() overlap=()
    [ -z "${REHEARSAL:-}" ] || rules=(--without symbols repeated-ngrams many-repeated-lines short-lines)
    [ -z "${TASKS:-}" ] || overlap=(--decontaminate "$TASKS" --decontaminate-action remove)
    step clean --in "$@" --out "$out/clean" --compress zst "${rules[@]}"
    step dedup --in "$out/clean" --out "$out/unique" --compress zst "${overlap[@]}"
}

# learn_tokenizer FOLDER: the paper's vocabulary, or one of its kind and size
learn_tokenizer() {
    local more=(--pad-to 51200)
    [ -z "${GPT2_BPE:-}" ] || more+=(--encoder-json "$GPT2_BPE/encoder.json" --vocab-bpe "$GPT2_BPE/vocab.bpe")
    [ -z "${REHEARSAL:-}" ] || more=(--vocab-size 400 --pad-to 512)
    step tokenizer --in "$1" --out "$out/tokenizer" --kind gpt2 "${more[@]}"
}

# rehearse RECIPE ESTIMATE_OPTIONS... -- SOURCES...: the dry run
rehearse() {
    local recipe="$1" options=() status=0
    shift
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    folder="$(mktemp -d)" # not local: the trap needs it when an error has left the function
    trap 'rm -rf "$folder"' EXIT
    "$SMLP" data fetch "$@" --out "$out/fetched" --dry-run --delete-downloads --compress zst --json "$folder/plan.json" ||
        status=1
    [ -s "$folder/plan.json" ] || exit 1 # a source is wrong
    python3 "$HERE/estimate.py" "$folder/plan.json" --workers $((workers * ${tasks:-1})) --price "${PRICE:-0.04}" \
        "${options[@]}"
    echo "rehearsal of all steps on the documentation in this project's code:"
    mkdir "$folder/text"
    python3 - "$("$SMLP" user-dir)" "$folder/text" <<'END'
import ast, pathlib, sys
KINDS = ast.Module, ast.ClassDef, ast.FunctionDef
package, out = map(pathlib.Path, sys.argv[1:])
for file in package.rglob("*.py"):
    nodes = [node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, KINDS)]
    texts = [text for node in nodes if (text := ast.get_docstring(node))]
    (out / f"{'-'.join(file.relative_to(package).with_suffix('').parts)}.txt").write_text("\n".join(texts))
END
    if REHEARSAL=1 bash "$HERE/$recipe.sh" "$folder/out" --workers 2 --source "$folder/text" >"$folder/log" 2>&1; then
        echo "  all steps work"
    else
        sed 's/^/  /' "$folder/log"
        status=1
    fi
    exit "$status"
}
