#!/usr/bin/env bash
# Hash layers, for a laptop
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
tiny hash_lm_tiny "$@"
