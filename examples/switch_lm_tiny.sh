#!/usr/bin/env bash
# Switch Transformer, for a laptop
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
tiny switch_lm_tiny "$@"
