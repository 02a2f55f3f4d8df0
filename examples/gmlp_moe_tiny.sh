#!/usr/bin/env bash
# gMLP layers as experts over tokens: an ablation, for a laptop
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
tiny gmlp_moe_tiny "$@"
