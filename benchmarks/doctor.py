"""`neobert doctor` on checkpoints of the published shape: seconds and peak memory of the whole command, imports included (Linux).

Each run is a process of its own, and the files are in the page cache.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import DTYPES, finish, median_and_spread, neobert_config, read_arguments

from neobert_hf import MINI_MODEL_PATH, NeoBERTForMaskedLM

# The command, and the peak memory of its process in kB. `ru_maxrss` would be that of the parent process, if it is larger.
SCRIPT = """
import atexit, re, sys
import neobert_cli
peak = lambda: re.search("VmHWM: *([0-9]+)", open("/proc/self/status").read().replace("\\t", " "))[1]
atexit.register(lambda: print(peak(), file=sys.stderr))
neobert_cli.main()
"""


def write_checkpoint(folder: Path, dtype: torch.dtype, num_layers: int) -> float:
    """Save a model with random weights; returns the size of its weights in MB."""
    model = NeoBERTForMaskedLM(neobert_config(4096, num_layers))
    model.to(dtype).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # it has fewer tokens, which is a finding
        shutil.copy(Path(MINI_MODEL_PATH, name), folder)
    return (folder / "model.safetensors").stat().st_size / 1e6


def run(folder: Path) -> tuple[float, float]:
    """Run the command; returns its seconds and its peak memory in MB."""
    started = time.perf_counter()
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, "doctor", str(folder), "--json"], capture_output=True, text=True
    )
    seconds = time.perf_counter() - started
    found = [finding["code"] for finding in json.loads(process.stdout)["findings"]]
    assert found == ["tokenizer-vocabulary"], process.stdout
    return seconds, int(process.stderr.split()[-1]) / 1e3


def main():
    """Write a checkpoint in each dtype, run the command on it several times, and print a table and one line of JSON."""
    arguments = read_arguments(__doc__, dtypes=["float32", "bfloat16"], num_rounds=5, num_layers=0)
    rows = []
    for dtype in arguments.dtypes:
        with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
            weights_mb = write_checkpoint(Path(folder), DTYPES[dtype], arguments.num_layers)
            runs = [run(Path(folder)) for _ in range(arguments.num_rounds + 1)][1:]
        seconds, spread = median_and_spread([seconds for seconds, _ in runs])
        peak = max(memory for _, memory in runs)
        rows.append(
            {"dtype": dtype, "weights_mb": weights_mb, "process_s": seconds, "spread": spread, "peak_rss_mb": peak}
        )
    finish("doctor", rows, arguments)


if __name__ == "__main__":
    main()
