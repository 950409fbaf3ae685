"""Time `make demo` and keep what it reached.

python benchmarks/demo.py --json benchmarks/results/demo.json
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from provenance import provenance
from tabulate import tabulate
from transformers import HfArgumentParser

EXAMPLE = Path(__file__).parents[1] / "examples/demo_documentation.py"


@dataclass
class DemoBenchmarkArguments:
    """Where to write."""

    json: str = field(default=None, metadata={"help": "File to write the result to."})


def main():
    """Run the demo as a user would, print the table, and end with one line of JSON."""
    (arguments,) = HfArgumentParser(DemoBenchmarkArguments).parse_args_into_dataclasses()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        subprocess.run([sys.executable, EXAMPLE, "--output_dir", folder], check=True)
        seconds = time.perf_counter() - started
        metrics = json.loads(Path(folder, "metrics.json").read_text("utf-8"))
    result = {"benchmark": "demo", "seconds": seconds, **metrics, **provenance()}
    print(tabulate(metrics["masked_accuracy"].items(), headers=["guess", "masked tokens right"], floatfmt=".1%"))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
