"""Packaging of smlp: sparse all-MLP language models on fairseq.

The distribution is called smlp-lm, because PyPI's smlp is another project; the package is imported as ``smlp``.
"""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "smlp" / "__init__.py").read_text()).group(1)

# fairseq 0.12.2, the last official release, does not import on Python 3.11 or newer. Two re-releases of
# the same sources do: ve-fairseq has wheels for Linux x86-64, fairseq-fixed is compiled from source.
HAS_FAIRSEQ_WHEEL = "sys_platform == 'linux' and platform_machine == 'x86_64'"
NO_FAIRSEQ_WHEEL = "sys_platform != 'linux' or platform_machine != 'x86_64'"
# Where Triton has wheels. torch's CUDA builds for Linux bring the version that they want, its CPU builds none.
HAS_TRITON_WHEEL = "sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')"

# Preparing corpora: formats, languages, near-duplicates, byte-level BPE. Training needs none of them.
DATA = [
    *(
        "datasketch>=2",
        "datasets>=3.2",
        "ftfy>=6.2",
        "huggingface_hub>=0.24",
        "lxml_html_clean>=0.4",
        "mwparserfromhell>=0.6.6",
        "py3langid>=0.4",
    ),
    *("pyarrow>=15", "requests>=2.31", "tokenizers>=0.20", "trafilatura>=1.8", "urllib3>=2.1", "warcio>=1.7.4"),
    "zstandard>=0.22",
]

# Image models and their training; timm brings torchvision. Pillow 13 refuses operations of timm's RandAugment.
VISION = ["pillow<13", "requests>=2.31", "scikit-learn>=1.4", "timm>=1.0.31", "urllib3>=2.1"]

# lm-evaluation-harness, and what of its own requirements is imported here.
LM_EVAL = ["datasets>=3.2", "jinja2>=3.1", "lm-eval>=0.4.13,<0.5"]

# torch.onnx.export, and a runtime for what it writes.
ONNX = ["onnx>=1.18", "onnxruntime>=1.22", "onnxscript>=0.5"]

# Models in Hugging Face transformers; accelerate is for its Trainer.
HF = ["accelerate>=1.10", "protobuf>=5", "safetensors>=0.4.3", "tokenizers>=0.22", "transformers>=5.20,<6"]

# A server of OpenAI's completions endpoint; in tests also its official client and a browser's remote control.
SERVE = ["starlette>=1", "uvicorn>=0.40"]

# What shows the logs of training: --tensorboard-logdir, --wandb-project.
LOGS = ["tensorboard>=2.18", "wandb>=0.19"]

# The documentation site (scripts/docs.sh).
DOCS = ["furo>=2025.7", "myst-parser>=4", "sphinx>=8.1", "sphinx-copybutton>=0.5.2"]


class BuildWithExamples(build_py):
    """Put the examples and the Slurm scripts into the wheel, where ``smlp.files.project_folder`` finds them."""

    def run(self):
        super().run()
        if not self.editable_mode:
            for folder in ("examples", "scripts/slurm"):
                target = Path(self.build_lib) / "smlp" / "project" / folder
                shutil.copytree(ROOT / folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


setup(
    name="smlp-lm",
    version=VERSION,
    description="Sparse all-MLP language models on fairseq: train, compare and score",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The smlp authors",
    license="MIT",
    license_files=["LICENSE"],
    project_urls={"Paper": "https://arxiv.org/abs/2203.06850"},
    keywords="all-MLP gMLP sMLP mixture-of-experts language-models fairseq",
    cmdclass={"build_py": BuildWithExamples},
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["smlp", "smlp.*", "data_prep", "data_prep.*"]),
    package_data={"data_prep": ["sources/*.toml"], "smlp": ["py.typed", "serving/page.html"]},
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
        "PyYAML>=6",
        "tqdm>=4.66",
    ],
    extras_require={
        "bench": ["g-mlp-gpt>=0.0.15", "g-mlp-pytorch>=0.1.5"],
        "lm-eval": LM_EVAL,
        "completion": ["shtab>=1.7"],
        "logs": LOGS,
        "onnx": ONNX,
        "data": DATA,
        "docs": DOCS,
        "export": ["safetensors>=0.4.3"],
        "hf": HF,
        "serve": SERVE,
        "plots": ["matplotlib>=3.8", "scipy>=1.11"],
        "squad": ["torchmetrics>=1.9,<2"],
        "vision": VISION,
        "test": [
            *("build>=1.2", "mypy>=1.18", "pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "ruff>=0.9"),
            *("scipy>=1.11", "matplotlib>=3.8", "safetensors>=0.4.3", *LM_EVAL),
            *("torchmetrics>=1.9,<2", *DATA, *DOCS, *HF, *ONNX, *VISION),
            *("httpx2>=2", "openai>=3", "playwright>=1.60", "shtab>=1.7", *LOGS, *SERVE),
            "torch-cka>=0.21",
            f"triton>=3.2; {HAS_TRITON_WHEEL}",  # its interpreter runs the GPU kernels on a CPU
        ],
    },
    entry_points={"console_scripts": ["smlp = smlp.cli.main:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
