"""Models of this package as models of Hugging Face ``transformers``; needs the extra ``hf``.

Importing it registers them with transformers' Auto classes::

    import smlp.hf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("exported")
    tokenizer = AutoTokenizer.from_pretrained("exported")

``smlp export CHECKPOINT DIR --hf`` writes the folder.
"""

try:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
except (ImportError, RuntimeError) as error:  # a dependency built for another torch raises either
    raise ImportError(f"smlp.hf needs transformers 5 ({error}): pip install -e '.[hf]'") from error

from smlp.hf.cache import SmlpCache
from smlp.hf.config import SmlpConfig, SmlpEncoderConfig
from smlp.hf.modeling import SmlpForCausalLM, SmlpForMaskedLM

AutoConfig.register(SmlpConfig.model_type, SmlpConfig, exist_ok=True)
AutoConfig.register(SmlpEncoderConfig.model_type, SmlpEncoderConfig, exist_ok=True)
AutoModelForCausalLM.register(SmlpConfig, SmlpForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(SmlpEncoderConfig, SmlpForMaskedLM, exist_ok=True)

__all__ = ["SmlpCache", "SmlpConfig", "SmlpEncoderConfig", "SmlpForCausalLM", "SmlpForMaskedLM"]
