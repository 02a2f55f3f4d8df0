#!/usr/bin/env bash
# sMLP, features routed by all tokens: an ablation that sees what it predicts, for a laptop
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
tiny smlp_leaky_tiny "$@"
