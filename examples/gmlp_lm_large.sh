#!/usr/bin/env bash
# gMLP of the large models' FLOPs: 32 blocks; not in the paper, with the recipe of Table 10
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
large gmlp_lm_large "$@"
