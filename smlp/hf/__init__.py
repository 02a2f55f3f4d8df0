"""Models of this package as models of Hugging Face ``transformers``; needs the extra ``hf``.

Importing it registers them with transformers' Auto classes::

    import smlp.hf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("exported")
    tokenizer = AutoTokenizer.from_pretrained("exported")

``smlp export CHECKPOINT DIR --hf`` writes the folder.
"""

import importlib
import sys
from importlib.util import find_spec


def _hide_what_cannot_be_loaded() -> None:
    """Let transformers go without torchvision and torchaudio where they were built for another torch.

    It only asks whether they are installed, and then cannot be imported itself. fairseq's metadata bring such a
    torchaudio beside torch's CPU build.
    """
    for name in ("torchvision", "torchaudio"):
        if name not in sys.modules and find_spec(name) is not None:
            try:
                importlib.import_module(name)
            except (ImportError, RuntimeError, OSError):
                sys.modules[name] = None  # type: ignore[assignment]


_hide_what_cannot_be_loaded()
try:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
except (ImportError, RuntimeError) as error:  # transformers raises either
    raise ImportError(f"smlp.hf needs transformers 5 ({error}): pip install -e '.[hf]'") from error

# ruff: noqa: E402
from smlp.hf.cache import SmlpCache
from smlp.hf.config import SmlpConfig, SmlpEncoderConfig
from smlp.hf.modeling import SmlpForCausalLM, SmlpForMaskedLM

AutoConfig.register(SmlpConfig.model_type, SmlpConfig, exist_ok=True)
AutoConfig.register(SmlpEncoderConfig.model_type, SmlpEncoderConfig, exist_ok=True)
AutoModelForCausalLM.register(SmlpConfig, SmlpForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(SmlpEncoderConfig, SmlpForMaskedLM, exist_ok=True)

__all__ = ["SmlpCache", "SmlpConfig", "SmlpEncoderConfig", "SmlpForCausalLM", "SmlpForMaskedLM"]
