#!/usr/bin/env bash
# gMLP, for a laptop
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
tiny gmlp_lm_tiny "$@"
