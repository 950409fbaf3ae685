"""Run the tests marked `compat` with other versions; COMPAT_RECORD=1 adds a line to benchmarks/results/versions.json.

    .venv/bin/python tests/compat.py 4.57.6          (this transformers)
    .venv/bin/python tests/compat.py 4.57.6 2.6.0    (this transformers and this torch)
    python3.10 tests/compat.py lowest                (the lower bounds of pyproject.toml)
    python3.13 tests/compat.py newest                (the newest of everything)

Each gets a virtual environment in .venv-compat, of the Python that runs this file. One for a version of transformers uses the
packages of the running environment after its own, so that pip installs only transformers and the dependencies with other
versions. Each torch is installed once for all of them.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/versions.json"
SHOWN = ["torch", "transformers", "tokenizers", "sentence-transformers", "datasets", "accelerate", "peft"]
# Not all marked tests: the oldest transformers that has EuroBERT reads its exports. Its Trainer accumulates batches otherwise.
ONLY = {"5.3.0": ["tests/export/test_eurobert.py"]}
TESTING = ["fastapi", "httpx", "hypothesis", "jupytext", "markdown-it-py", "uvicorn"]
TESTING += ["pytest", "pytest-timeout", "pytest-xdist"]
DESCRIBE = f"""
import importlib.metadata, json, platform
found = {{package.name.lower(): package.version for package in reversed(list(importlib.metadata.distributions()))}}
print(json.dumps({{"Python": platform.python_version(), **{{name: found.get(name) for name in {SHOWN}}}}}))
"""


def environment(version: str, torch: str | None = None) -> Path:
    if torch is None and find_spec("transformers") and version == importlib.metadata.version("transformers"):
        return Path(sys.executable)
    folder = ROOT / ".venv-compat" / (f"{version}-torch-{torch}" if torch else version)
    python = folder / "bin/python"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True, clear=True)
        constraints = folder / "constraints.txt"
        if version == "lowest":
            bounds = re.findall(r'"([\w-]+)>=([\w.]+)', (ROOT / "pyproject.toml").read_text("utf-8"))
            constraints.write_text("".join(f"{name}=={bound}\n" for name, bound in bounds if name != "setuptools"))
            install(python, "--constraint", constraints, "-e", f"{ROOT}[train]", *TESTING)
            # beside its requirements: it asks for the huggingface_hub of transformers 5, and runs with this one
            install(python, "--constraint", constraints, "--no-deps", "sentence-transformers", "semantic-text-splitter")
        elif version == "newest":
            install(python, "-e", f"{ROOT}[test]")
        else:
            share(folder, [*([install_torch(torch, python)] if torch else []), sysconfig.get_paths()["purelib"]])
            # their versions depend on transformers
            free = ("transformers", "tokenizers", "huggingface_hub", "datasets")
            lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
            constraints.write_text("\n".join(line for line in lines if not line.startswith(free)))
            # Trainer imports datasets; newer ones need the huggingface_hub of transformers 5
            datasets = ["datasets<4.5"] if version.startswith("4.") else []
            install(python, "--constraint", constraints, f"transformers=={version}", *datasets)
        (folder / "installed").touch()
    return python


def install(python: Path, *arguments: str | Path) -> None:
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([*pip, *arguments], check=True)


def share(folder: Path, places: list[str | Path]) -> None:
    """Let a virtual environment also see the packages in these places; its own take precedence."""
    own = folder / f"lib/python{sysconfig.get_python_version()}/site-packages"
    (own / "shared.pth").write_text("".join(f"import site; site.addsitedir({str(place)!r})\n" for place in places))


def install_torch(version: str, python: Path) -> Path:
    """Install torch into a separate folder, with the CUDA libraries that its Linux build imports."""
    folder = ROOT / ".venv-compat" / f"torch-{version}"
    if not (folder / "installed").exists():
        install(python, "--target", folder, f"torch=={version}")
        (folder / "installed").touch()
    return folder


def record(versions: dict, report: Path) -> None:
    """Write the counts of pytest's report to the stored result, in the place of an older line of the same versions."""
    suite = ElementTree.parse(report).getroot()[0]
    counts = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    row = versions | {"passed": passed, "failed": failed, "skipped": counts["skipped"]}
    result = json.loads(RESULT.read_text("utf-8"))
    rows = [old for old in result["rows"] if any(old[key] != value for key, value in versions.items())]
    result["rows"] = sorted(
        [*rows, row], key=lambda row: [[int(n) for n in re.findall(r"\d+", row[key])] for key in ("Python", *SHOWN[:2])]
    )
    RESULT.write_text(json.dumps(result, indent=2) + "\n", "utf-8")


def main(version: str, torch: str | None = None) -> int:
    python = environment(version, torch)
    run = subprocess.run([python, "-c", DESCRIBE], check=True, capture_output=True, text=True, cwd=ROOT)
    found = json.loads(run.stdout)
    print(", ".join(f"{name} {value}" for name, value in found.items()), flush=True)
    wanted = {"transformers": version if version[0].isdigit() else "", "torch": torch or ""}
    if any(not found[name].startswith(value) for name, value in wanted.items()):
        sys.exit(f"found {found}, expected {wanted}; remove .venv-compat and run again")
    report = ROOT / ".venv-compat/report.xml"
    report.unlink(missing_ok=True)  # that of an earlier run, in case this one ends before it writes its own
    options = ["-n", "auto", "--dist", "worksteal", "-m", "compat and not gpu", f"--junitxml={report}"]
    tests = ONLY.get(version, ["tests", "examples", "hub_upload"])
    status = subprocess.run([python, "-m", "pytest", "-q", *options, *tests], cwd=ROOT).returncode
    if "COMPAT_RECORD" in os.environ:
        record({"tests": "core"} | found, report)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
