"""What gpu.sh must know about the GPU: a name for its results, the dtype, and sizes that fit its memory.

    python benchmarks/card.py            (prints NAME DTYPE MAX_TOKENS BATCH TRAIN_BATCH)

DTYPE in the environment overrides `best_dtype`. Sizes: training the published code on 512-token rows needs about 2.5 GB for each
row beside 5 GB for weights and optimizer, so 16 rows need 45 GB and 4 rows 15 GB.
"""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

RESULTS = Path(__file__).parent / "results/gpu"
PACKAGES = ("accelerate", "datasets", "matplotlib", "pytest", "sentence_transformers", "tabulate")  # they bring torch
LARGE, SMALL = (65_536, 256, 16), (8_192, 32, 4)  # from 39 GiB on, and below


def card_name(device_name: str) -> str:
    """The name of a GPU as a folder: "Tesla T4" is tesla_t4."""
    return re.sub(r"\W+", "_", device_name.lower()).strip("_")


def results_folder() -> Path:
    """The folder for results of the GPU that is here: a result of one card never replaces that of another."""
    import torch

    return Path(os.environ.get("RESULTS") or RESULTS / card_name(torch.cuda.get_device_name()))


def main():
    """Print the settings in one line.

    Raises:
        SystemExit: A package is missing, there is no GPU that this torch can use, or DTYPE is unknown.
    """
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise SystemExit(f'{", ".join(missing)}: missing in {sys.executable}; pip install -e ".[train,embed]" pytest')
    import torch

    if not torch.cuda.is_available():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        raise SystemExit(
            f"No GPU: torch {torch.__version__}, {build}, finds none. On Colab choose Runtime, Change runtime type, T4 GPU; "
            "elsewhere check nvidia-smi, and give a Python that has a CUDA build of torch: make measure-gpu PYTHON=..."
        )
    name = torch.cuda.get_device_name()
    try:
        torch.zeros(1, device="cuda").add(1)
    except RuntimeError as error:  # the build has no kernels for this GPU, or other processes fill its memory
        kinds, reason = ", ".join(torch.cuda.get_arch_list()), str(error).partition("\n")[0]
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        raise SystemExit(
            f"{name} (capability {capability}) fails with torch {torch.__version__} (for {kinds}): {reason}; give a Python with "
            "another build of torch: make measure-gpu PYTHON=..."
        ) from None

    from neobert_hf import best_dtype

    dtype = os.environ.get("DTYPE") or str(best_dtype("cuda")).removeprefix("torch.")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise SystemExit(f"DTYPE={dtype} is not bfloat16, float16 or float32")
    sizes = LARGE if torch.cuda.get_device_properties(0).total_memory >= 39 * 2**30 else SMALL
    print(card_name(name), dtype, *sizes)


if __name__ == "__main__":
    main()
