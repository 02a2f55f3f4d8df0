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

from smlp.launch.machine import let_torchvision_load


def _hide_torchaudio_if_it_cannot_be_loaded() -> None:
    """Let transformers be imported without a torchaudio that was built for another torch.

    transformers only checks that torchaudio is installed, and fails if torchaudio then cannot be loaded. fairseq's
    metadata install such a torchaudio next to torch's CPU build.
    """
    if "torchaudio" not in sys.modules and find_spec("torchaudio") is not None:
        try:
            importlib.import_module("torchaudio")
        except (ImportError, RuntimeError, OSError):
            sys.modules["torchaudio"] = None  # type: ignore[assignment]


let_torchvision_load()
_hide_torchaudio_if_it_cannot_be_loaded()
try:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except (ImportError, RuntimeError) as error:  # transformers raises either
    raise ImportError(f"smlp.hf needs transformers 5 ({error}): pip install -e '.[hf]'") from error

# ruff: noqa: E402
from smlp.hf.cache import SmlpCache
from smlp.hf.config import SmlpConfig, SmlpEncoderConfig
from smlp.hf.modeling import SmlpForCausalLM, SmlpForMaskedLM

AutoConfig.register(SmlpConfig.model_type, SmlpConfig, exist_ok=True)
AutoConfig.register(SmlpEncoderConfig.model_type, SmlpEncoderConfig, exist_ok=True)
AutoModelForCausalLM.register(SmlpConfig, SmlpForCausalLM, exist_ok=True)
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[SmlpConfig.model_type] = SmlpForCausalLM.__name__  # Trainer shifts labels by it
AutoModelForMaskedLM.register(SmlpEncoderConfig, SmlpForMaskedLM, exist_ok=True)

__all__ = ["SmlpCache", "SmlpConfig", "SmlpEncoderConfig", "SmlpForCausalLM", "SmlpForMaskedLM"]
