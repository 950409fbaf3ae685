"""The page for the browser in headless Chromium: bytes, the first answer after a cold load and a reload, an answer when loaded.

    python hub_upload/space.py runs/space
    python benchmarks/browser.py runs/space --json benchmarks/results/browser_cpu.json

Needs what `make test-runtimes` installs. The server runs on the same machine, so no time includes a network.
"""

import argparse
import json
import subprocess
from pathlib import Path

from harness import finish, median_and_spread

NODE = Path(__file__).parents[1] / "tests/export/node"
WHAT = {
    "cold": "first answer, nothing stored before",
    "reload": "first answer after a reload",
    "search": "a search when loaded",
    "fill": "filling masks when loaded",
}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="What hub_upload/space.py wrote.")
    parser.add_argument("--num_rounds", type=int, default=5, help="Number of browsers, each with a new profile.")
    parser.add_argument("--json", help="File for the result; its table goes beside it.")
    arguments = parser.parse_args()
    if not (NODE / "node_modules").exists():
        parser.error("the npm packages are missing; run make test-runtimes")
    megabytes = sum(file.stat().st_size for file in arguments.folder.rglob("*") if file.is_file()) / 1e6
    command = ["node", "measure.mjs", str(arguments.folder.resolve()), str(arguments.num_rounds)]
    done = subprocess.run(command, cwd=NODE, stdout=subprocess.PIPE, text=True, check=True)
    measured = json.loads(done.stdout)
    rows = [{"what": "the whole folder", "saved_mb": megabytes}]
    for name, milliseconds in measured["times"].items():
        median, spread = median_and_spread(milliseconds)
        rows.append({"what": WHAT[name], "milliseconds": median, "spread": spread})
    arguments.folder = str(arguments.folder)
    finish("browser", rows, arguments, chromium=measured["chromium"])


if __name__ == "__main__":
    main()
