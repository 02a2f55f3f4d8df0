#!/usr/bin/env bash
# sMLP, features routed by all tokens: an ablation that sees what it predicts (appendix B)
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
small_sparse smlp_leaky "$@"
