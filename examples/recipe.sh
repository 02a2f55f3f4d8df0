# Sourced by the command files in this folder: the training recipes of the paper (Yu et al., 2022, Tables 8 to 10).
#
#   bash examples/smlp.sh DATA SAVE_DIR [any option of fairseq-train]
#
# The paper trained on 32 GPUs. GPUS=N (default 1) keeps its tokens per update on N of them by accumulating gradients
# over more batches; fairseq-train or your launcher chooses the devices. Later options override earlier ones, such as
# --update-freq 1 or --max-update 100.
# TRAIN_COMMAND replaces "fairseq-train", for example TRAIN_COMMAND="smlp train" or TRAIN_COMMAND=echo to see the command first.
set -euo pipefail

EXAMPLES="$(CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
USER_DIR="$EXAMPLES/../smlp" # of the clone; outside a clone, the installed package
[ -f "$USER_DIR/__init__.py" ] || USER_DIR="$(smlp user-dir)"
PAPER_GPUS=32

# recipe ARCH CONTEXT BATCH_SIZE ACCUMULATE OPTIONS... -- DATA SAVE_DIR MORE...
#   ACCUMULATE: batches on each of the paper's 32 GPUs before an update
recipe() {
    local arch="$1" context="$2" batch_size="$3" accumulate="$4" gpus="${GPUS:-1}"
    shift 4
    local options=()
    while [ "$1" != "--" ]; do
        options+=("$1")
        shift
    done
    shift
    if [ "$#" -lt 2 ]; then
        echo "usage: bash examples/$arch.sh DATA SAVE_DIR [any option of fairseq-train]" >&2
        exit 2
    fi
    local data="$1" save_dir="$2"
    shift 2
    if ! [[ "$gpus" =~ ^[1-9][0-9]{0,17}$ ]] || [ $((PAPER_GPUS * accumulate % gpus)) -ne 0 ]; then
        echo "smlp: error: GPUS=$gpus does not divide the $((PAPER_GPUS * accumulate)) batches of an update: choose a number that does" >&2
        exit 1
    fi
    ${TRAIN_COMMAND:-fairseq-train} "$data" --user-dir "$USER_DIR" --task language_modeling --arch "$arch" \
        --tokens-per-sample "$context" --batch-size "$batch_size" --update-freq $((PAPER_GPUS * accumulate / gpus)) \
        --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.1 --ddp-backend legacy_ddp \
        --save-dir "$save_dir" "${options[@]}" "$@"
}

SCHEDULE=(--lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-7 --dropout 0.1)

# paper ARCH BATCH_SIZE ACCUMULATE LR UPDATES DATA SAVE_DIR MORE...
paper() {
    recipe "$1" 1024 "$2" "$3" --lr "$4" "${SCHEDULE[@]}" --max-update "$5" -- "${@:6}"
}

# Table 8: 4 x 1024 tokens a GPU, 4 batches an update, 25k updates (Table 4)
small_sparse() { paper "$1" 4 4 5e-4 25000 "${@:2}"; }

# Table 9: 2 x 1024 tokens a GPU, 4 batches an update
small_dense() { paper "$1" 2 4 5e-4 25000 "${@:2}"; }

# Table 10: 2 x 1024 tokens a GPU, 8 batches an update, 100k updates (Table 4)
large() { paper "$1" 2 8 1e-3 100000 "${@:2}"; }

# For a laptop; not the paper's: 8 x 128 tokens an update
tiny() {
    PAPER_GPUS=1 recipe "$1" 128 8 1 --lr 5e-3 --lr-scheduler cosine --warmup-updates 50 --warmup-init-lr 1e-7 \
        --clip-norm 1.0 --dropout 0 --no-epoch-checkpoints --max-update 1000 -- "${@:2}"
}
