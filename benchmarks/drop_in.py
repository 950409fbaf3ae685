"""Error of a checkpoint in the published layout after its code was replaced, on several versions of transformers.

    python benchmarks/drop_in.py --json benchmarks/results/drop_in.json

Copies of the golden checkpoints of the tests get the code of this package, as `hub_upload/push.py --drop-in` gives it. A process
without the package loads them with trust_remote_code, in the environments of tests/compat.py. An error is the largest error over
the largest value, in float32: of logits where the checkpoint has the head, otherwise of the last hidden state.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import transformers
from harness import finish, read_arguments
from tqdm.auto import tqdm

sys.path += [str(Path(__file__).parents[1] / name) for name in ("tests", "hub_upload")]
from compat import environment
from replacement import replace_code

TESTS = Path(__file__).parents[1] / "tests"
OWN = {"AutoModelForMaskedLM": "masked_lm", "AutoModelForSequenceClassification": "classifier"}


def measure(versions: list[str]) -> list[dict]:
    """Return one row of errors for each version of transformers."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for kind in OWN.values():
            shutil.copytree(TESTS / "golden" / kind, Path(place, kind))
            replace_code(Path(place, kind), "org/name")
        for version in tqdm(versions, unit=" versions"):
            errors = {}
            for kind in OWN.values():
                command = [environment(version, None), "-I", TESTS / "loads_golden.py", Path(place, kind)]
                run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                errors[kind] = json.loads(run.stdout.splitlines()[-1])
            own = {name: errors[kind][name] for name, kind in OWN.items()}
            others = errors["masked_lm"].keys() - own.keys() - {"AutoModel"}
            base = max(errors[kind]["AutoModel"] for kind in errors)
            heads = max(errors[kind][name] for kind in errors for name in others)
            rows.append({"transformers": version, "AutoModel": base, **own, "other heads": heads})
    return rows


def main():
    """Measure, print the table, and end with one line of JSON."""
    arguments = read_arguments(__doc__, versions=["4.57.6", "5.0.0", "5.17.0", transformers.__version__])
    finish("drop_in", measure(arguments.versions), arguments)


if __name__ == "__main__":
    main()
