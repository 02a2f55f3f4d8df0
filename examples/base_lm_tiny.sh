#!/usr/bin/env bash
# BASE layers, for a laptop
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
tiny base_lm_tiny "$@"
