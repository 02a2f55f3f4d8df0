#!/usr/bin/env bash
# An encoder by masked language modelling, as in the gMLP paper (appendix A of Liu et al., 2021):
#
#   bash examples/masked_lm.sh ARCH DATA SAVE_DIR [any option of fairseq-train]
#
# 128 tokens: 2,048 texts an update, 125,000 updates; base, large and xlarge: 512 tokens, 256 texts, 1,000,000 updates.
# GPUS and TRAIN_COMMAND as in recipe.sh.
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

if [ "$#" -lt 3 ]; then
    echo "usage: bash examples/masked_lm.sh ARCH DATA SAVE_DIR [any option of fairseq-train]" >&2
    exit 2
fi
arch="$1"
shift
linear=(--task masked_lm --criterion masked_lm --adam-betas '(0.9, 0.999)' --adam-eps 1e-6 --weight-decay 0.01
    --dropout 0 --lr-scheduler polynomial_decay)

# masked CONTEXT BATCH_SIZE LR WARMUP UPDATES DATA SAVE_DIR MORE...
masked() {
    recipe "$arch" "$1" "$2" 1 "${linear[@]}" --lr "$3" --warmup-updates "$4" --total-num-update "$5" \
        --max-update "$5" -- "${@:6}"
}

case "$arch" in
    *_tiny) PAPER_GPUS=1 masked 64 32 3e-3 200 4000 "$@" ;; # for a laptop; not the paper's
    *_base | *_large | *_xlarge) masked 512 8 1e-4 10000 1000000 "$@" ;;
    *) masked 128 64 7e-4 10000 125000 "$@" ;;
esac
