"""The named architectures by what they are: language models, which most tests are about, and encoders."""

from smlp.config.presets import PRESETS, preset

ENCODERS = [arch for arch in PRESETS if preset(arch).is_bidirectional]
LANGUAGE_MODELS = [arch for arch in PRESETS if arch not in ENCODERS]
