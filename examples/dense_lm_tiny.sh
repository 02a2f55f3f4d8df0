#!/usr/bin/env bash
# Transformer, for a laptop
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
tiny dense_lm_tiny "$@"
