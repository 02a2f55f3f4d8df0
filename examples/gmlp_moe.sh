#!/usr/bin/env bash
# gMLP layers as experts over tokens: an ablation (appendix A), with the recipe of Table 8
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
small_sparse gmlp_moe "$@"
