# shellcheck shell=bash
# Sourced by submit.sh and by the .sbatch files: turns what a user types into the arguments of `smlp train`.
# shellcheck disable=SC2034  # the arrays are used by the scripts that source this
#
#   fail MESSAGE               ends with one sentence
#   set_arguments RANKS ...    ARGUMENTS, from a command file of examples/ and its arguments, or arguments of `smlp train`
#   check_arguments            refuses arguments that are incompatible with restarts
#   read_sweep LIST            RUN_NAMES and RUN_LINES, one entry for each run of a sweep
#   set_run_arguments ...      ARGUMENTS of one run of a sweep
#
# Needs bash 4.4.

fail() {
    echo "smlp: error: $1" >&2
    exit 1
}

check_number() {
    [[ "$2" =~ ^[1-9][0-9]{0,17}$ ]] || fail "$1 needs a number of at least 1, not '$2'"
}

# set_arguments RANKS FILE.sh DATA SAVE_DIR [OPTIONS]   or   set_arguments RANKS ARGUMENTS_OF_SMLP_TRAIN
set_arguments() {
    local ranks="$1" file="${2:-}"
    shift
    if [[ "$file" != *.sh ]]; then
        ARGUMENTS=("$@")
        return
    fi
    [ -f "$file" ] || fail "there is no command file $file"
    # Any other script would start training here instead of printing its command.
    grep -Eq '^(source|\.) .*recipe\.sh' "$file" || fail "$file does not use examples/recipe.sh, so its command is unknown: give the arguments of smlp train instead"
    shift
    mapfile -d '' -t ARGUMENTS < <(GPUS="$ranks" TRAIN_COMMAND='printf %s\0' bash "$file" "$@")
    wait $! || exit 1
}

# A restarted job runs the same command again.
check_arguments() {
    local word
    [[ "${SMLP_MAX_RESTARTS:-0}" =~ ^[0-9]{1,18}$ ]] || fail "SMLP_MAX_RESTARTS is '$SMLP_MAX_RESTARTS', not a number of at most 18 digits"
    [ "${SMLP_MAX_RESTARTS:-}" = 0 ] && return
    for word in "${ARGUMENTS[@]}"; do
        case "${word%%=*}" in
        --restore-file | --reset-optimizer | --reset-lr-scheduler | --reset-meters | --reset-dataloader)
            fail "${word%%=*} would apply again at every restart of the job: give --finetune-from-model FILE, or set SMLP_MAX_RESTARTS=0"
            ;;
        --no-save | --no-last-checkpoints)
            fail "with ${word%%=*}, no checkpoint is saved and every restart of the job would start from the beginning: leave it out, or set SMLP_MAX_RESTARTS=0"
            ;;
        esac
    done
}

# value_of OPTION DEFAULT: its value in ARGUMENTS; the last one counts
value_of() {
    local value="$2" index
    for index in "${!ARGUMENTS[@]}"; do
        case "${ARGUMENTS[index]}" in
        "$1") value="${ARGUMENTS[index + 1]:-}" ;;
        "$1="*) value="${ARGUMENTS[index]#*=}" ;;
        esac
    done
    echo "$value"
}

read_sweep() {
    local list="$1" line number=0 rest name
    local -A seen=()
    [ -f "$list" ] || fail "there is no list of runs $list"
    RUN_NAMES=() RUN_LINES=()
    while IFS= read -r line || [ -n "$line" ]; do
        number=$((number + 1))
        line="${line%$'\r'}"
        [[ "$line" =~ ^[[:space:]]*(#|$) ]] && continue
        read -r name rest <<<"$line"
        [[ "$name" =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] ||
            fail "$list, line $number: '$name' cannot be the name of a run: it begins with a letter or digit and may have letters, digits, '.', '_' and '-'"
        [ -n "$rest" ] || fail "$list, line $number: nothing follows the name '$name': add a command file or options"
        [ -z "${seen[$name]:-}" ] || fail "$list, line $number: line ${seen[$name]} has the name '$name' already"
        [ "${#rest}" -lt 100000 ] || fail "$list, line $number: ${#rest} characters are too many for a command"
        xargs printf '' <<<"$rest" 2>/dev/null || fail "$list, line $number: a quotation mark is not closed"
        seen[$name]=$number
        RUN_NAMES+=("$name")
        RUN_LINES+=("$rest")
    done <"$list"
    [ "${#RUN_NAMES[@]}" -gt 0 ] || fail "there are no runs in $list"
}

# set_run_arguments RANKS INDEX DATA SAVE_ROOT [OPTIONS]: INDEX counts from 0; options for all runs come last
set_run_arguments() {
    local ranks="$1" index="$2" data="$3" save_dir="$4/${RUN_NAMES[$2]}" words given
    shift 4
    mapfile -d '' -t words < <(xargs printf '%s\0' <<<"${RUN_LINES[index]}")
    if [[ "${words[0]}" == *.sh ]]; then
        # as given in the list, relative to the folder of submission, or in the clone
        [ -f "${words[0]}" ] || [[ "${words[0]}" == /* ]] || words[0]="$SMLP_ROOT/${words[0]}"
        set_arguments "$ranks" "${words[0]}" "$data" "$save_dir" "${words[@]:1}" "$@"
    else
        set_arguments "$ranks" "$data" --save-dir "$save_dir" "${words[@]}" "$@"
    fi
    given="$(value_of --save-dir "$save_dir")"
    [ "$given" = "$save_dir" ] || fail "run ${RUN_NAMES[index]} of the sweep is saved in $save_dir: leave --save-dir $given out"
}
