#!/usr/bin/env bash
# Transformer of the large models' FLOPs: 17 layers; not in the paper, with the recipe of Table 10
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
large dense_lm_large "$@"
