#!/usr/bin/env bash
# GShard, for a laptop
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
tiny gshard_lm_tiny "$@"
