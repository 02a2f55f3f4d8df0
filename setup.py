"""Packaging of smlp: sparse all-MLP language models on fairseq."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "smlp" / "__init__.py").read_text()).group(1)

# fairseq 0.12.2, the last official release, does not import on Python 3.11 or newer. Two re-releases of
# the same sources do: ve-fairseq has wheels for Linux x86-64, fairseq-fixed is compiled from source.
HAS_FAIRSEQ_WHEEL = (
    "sys_platform == 'linux' and platform_machine == 'x86_64' "
    "and (python_version == '3.11' or python_version == '3.12')"
)
NO_FAIRSEQ_WHEEL = (
    "sys_platform != 'linux' or platform_machine != 'x86_64' or (python_version != '3.11' and python_version != '3.12')"
)
# Where Triton has wheels. torch's CUDA builds for Linux bring the version that they want, its CPU builds none.
HAS_TRITON_WHEEL = "sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')"

# Preparing corpora: formats, languages, near-duplicates, byte-level BPE. Training needs none of them.
DATA = [
    *(
        "datasketch>=2",
        "datasets>=3.2",
        "ftfy>=6.2",
        "lxml_html_clean>=0.4",
        "mwparserfromhell>=0.6.6",
        "py3langid>=0.4",
    ),
    *("pyarrow>=15", "requests>=2.31", "tokenizers>=0.20", "trafilatura>=1.8", "urllib3>=2.1", "warcio>=1.7.4"),
    "zstandard>=0.22",
]

# Models in Hugging Face transformers; accelerate is for its Trainer.
HF = ["accelerate>=1.10", "protobuf>=5", "safetensors>=0.4.3", "tokenizers>=0.22", "transformers>=5.20,<6"]

# The documentation site (scripts/docs.sh).
DOCS = ["furo>=2025.7", "myst-parser>=4", "sphinx>=8.1"]

setup(
    name="smlp",
    version=VERSION,
    description="Sparse all-MLP language models on fairseq: train, compare and score",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["smlp", "smlp.*", "data_prep", "data_prep.*"]),
    package_data={"data_prep": ["sources/*.toml"], "smlp": ["py.typed"]},
    install_requires=[
        "torch>=2.6",
        f"ve-fairseq==0.12.3; {HAS_FAIRSEQ_WHEEL}",
        f"fairseq-fixed==0.12.3.1; {NO_FAIRSEQ_WHEEL}",
        "hydra-core==1.3.2",
        "omegaconf==2.3.0",
        "fairscale>=0.4.13",
        "sentencepiece>=0.2",
        "fvcore>=0.1.5",
        "numpy>=1.26",
    ],
    extras_require={
        "bench": ["g-mlp-gpt>=0.0.15", "g-mlp-pytorch>=0.1.5"],
        "lm-eval": ["lm-eval>=0.4.13,<0.5"],
        "data": DATA,
        "docs": DOCS,
        "export": ["safetensors>=0.4.3"],
        "hf": HF,
        "plots": ["matplotlib>=3.8", "scipy>=1.11"],
        "squad": ["torchmetrics>=1.9,<2"],
        "test": [
            *("mypy>=1.18", "pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "ruff>=0.9"),
            *("scipy>=1.11", "matplotlib>=3.8", "safetensors>=0.4.3", "lm-eval>=0.4.13,<0.5"),
            *("torchmetrics>=1.9,<2", *DATA, *DOCS, *HF),
            f"triton>=3.2; {HAS_TRITON_WHEEL}",  # its interpreter runs the GPU kernels on a CPU
        ],
    },
    entry_points={"console_scripts": ["smlp = smlp.cli.main:main"]},
    classifiers=[
        "License :: OSI Approved :: MIT License",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
