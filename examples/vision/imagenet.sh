#!/usr/bin/env bash
# Trains MLP-Mixer or gMLP on ImageNet as the papers print it, 300 epochs with batches of 4,096:
#
#   GPUS=8 bash examples/vision/imagenet.sh MODEL DATA [any option of smlp vision train]
#
# MODEL is smlp_gmlp_ti16, smlp_gmlp_s16, smlp_gmlp_b16 (Liu et al., 2021, Tables 1 and 7) or smlp_mixer_b16,
# smlp_mixer_b32, smlp_mixer_l16, smlp_mixer_l32, smlp_mixer_s16, smlp_mixer_s32 (Tolstikhin et al., 2021, supplement,
# Table 1; S as B). DATA holds train and validation with 1,000 folders each. GPUS (default 1) train BATCH (default 128)
# images at a time each and accumulate gradients up to 4,096 images. Later options override earlier ones. TRAIN_COMMAND
# replaces "smlp vision train", for example TRAIN_COMMAND=echo to see the options, or TRAIN_COMMAND="torchrun ... -m
# smlp vision train" for several machines, with GPUS then the number on all of them.
set -euo pipefail
if [ "$#" -lt 2 ]; then
    echo "usage: bash examples/vision/imagenet.sh MODEL DATA [any option of smlp vision train]" >&2
    exit 2
fi
model="$1" data="$2" gpus="${GPUS:-1}" batch="${BATCH:-128}"
shift 2
if ! [[ "$gpus" =~ ^[1-9][0-9]{0,3}$ && "$batch" =~ ^[1-9][0-9]{0,3}$ ]] || [ $((4096 % (gpus * batch))) -ne 0 ]; then
    echo "smlp: error: GPUS=$gpus times BATCH=$batch does not divide the 4096 images of an update: choose numbers that do" >&2
    exit 1
fi

# 10,000 updates of warm-up are 32 epochs of 313 updates
common=(--img-size 224 --num-classes 1000 --epochs 300 --warmup-epochs 32 --warmup-lr 0 --sched-on-updates
    --opt adamw --lr 1e-3 --clip-grad 1 --amp --amp-dtype bfloat16)
gmlp=(--opt-eps 1e-6 --weight-decay 0.05 --sched cosine --aa original --mixup 0.8 --cutmix 1 --mixup-switch-prob 0.5
    --smoothing 0.1)
# two layers of RandAugment; the supplement does not print batch, warm-up, clipping and decay: these are our choice
mixer=(--weight-decay 0.1 --sched poly --decay-rate 1 --aa rand-m15-n2 --mixup 0.5 --smoothing 0 --drop-path 0.1)
case "$model" in
    smlp_gmlp_ti16) recipe=("${gmlp[@]}" --drop-path 0) ;;
    smlp_gmlp_s16) recipe=("${gmlp[@]}" --drop-path 0.05) ;;
    smlp_gmlp_b16) recipe=("${gmlp[@]}" --drop-path 0.2) ;;
    smlp_mixer_*) recipe=("${mixer[@]}") ;;
    *)
        echo "smlp: error: there is no recipe for $model: the papers have one for smlp_gmlp_ti16, _s16 and _b16 and for smlp_mixer_*" >&2
        exit 1
        ;;
esac
ranks=(--nproc "$gpus")
if [ -n "${TRAIN_COMMAND:-}" ]; then
    ranks=()
fi
${TRAIN_COMMAND:-smlp vision train} ${ranks[@]+"${ranks[@]}"} --data-dir "$data" --model "$model" --batch-size "$batch" \
    --grad-accum-steps $((4096 / gpus / batch)) "${common[@]}" "${recipe[@]}" "$@"
