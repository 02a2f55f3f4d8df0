"""Compiles the kernels for GPUs that need not be there, which the interpreter does not try; for test_triton_spatial.py.

Prints, as JSON, for each kernel and compute capability the instructions found in its assembly.
"""

import json
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from smlp.ops import triton_kernels, triton_spatial

POINTERS = {"x", "weight", "bias", "gate", "grad", "out", "grad_gate", "parts"}
#: strides of one between neighbours, as the launcher finds them in the models
NEIGHBOURS = dict.fromkeys(("x_feature", "gate_feature", "grad_feature", "bias_token"), 1)
UPPER = {"TRANSPOSED": True, "bias": None, "weight_row": 1}
LOWER = {"TRANSPOSED": False, "weight_step": 1}
PLAIN = {"gate": None, "grad": None, "grad_gate": None}

#: name, kernel, type, constants
KERNELS = [
    ("gradients of a gate", "project", "bf16", LOWER),
    ("transposed", "project", "fp16", {**UPPER, **PLAIN}),
    ("weights", "weight_gradient", "bf16", {"SPLIT": False, "BLOCK_C": 64}),
    ("weights, in parts", "weight_gradient", "fp16", {"SPLIT": True, "BLOCK_C": 16}),
    ("forward", "project", "bf16", {**LOWER, **PLAIN}),
    ("parts", "add_parts", "bf16", {"STRIP": 16, "BLOCK": 128}),
]


def compiled(kernel, dtype, constants, capability):
    """What the compiler makes of a kernel with its first launch settings."""
    function = getattr(triton_kernels, kernel)
    choices = {"project": triton_spatial.PROJECTION, "weight_gradient": triton_spatial.WEIGHT_GRADIENT}
    settings = choices[kernel][0] if kernel in choices else {}
    options = {name: value for name, value in settings.items() if name.startswith("num_")}
    given = {**NEIGHBOURS, **constants, **settings, "WIDEN": False}
    constants = {name: given[name] for name in function.arg_names if name in given}
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        in_float32 = name == "parts" or (name == "out" and constants.get("SPLIT"))
        pointer = "*fp32" if in_float32 else f"*{dtype}"
        signature[name] = "constexpr" if name in constants else pointer if name in POINTERS else "i32"
        if name not in constants and name not in ("num_tokens", "num_seqs", "num_parts"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main():
    """Prints {name, capability: counts of instructions}; of capability 8.0 only for some, for time's sake."""
    found = {}
    for capability, names in ((80, ("gradients of a gate",)), (90, [name for name, *_ in KERNELS])):
        for name, *kernel in (kernel for kernel in KERNELS if kernel[0] in names):
            ptx = compiled(*kernel, capability).asm["ptx"]
            found[f"{name}, sm_{capability}"] = {
                "tensor core": len(re.findall(r"wgmma\.mma_async|mma\.sync", ptx)),
                "wide copies": len(re.findall(r"cp\.async\.cg\.shared\.global", ptx)),
                "narrow copies": len(re.findall(r"cp\.async\.ca\.shared\.global", ptx)),
                "atomic": len(re.findall(r"\b(?:atom|red)\.", ptx)),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
