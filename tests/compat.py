"""Run the tests marked `compat` with another version of transformers, and of torch.

    .venv/bin/python tests/compat.py 4.57.6
    .venv/bin/python tests/compat.py 4.57.6 2.6.0

Each version gets a virtual environment in .venv-compat. It uses the packages of the running environment after its own, so
that pip installs only transformers and the dependencies with other versions. Each torch is installed once for all of them.
"""

import importlib.metadata
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

root = Path(__file__).parents[1]


def environment(version: str, torch: str | None) -> Path:
    """Create the virtual environment if it does not exist, and return its Python."""
    if version == importlib.metadata.version("transformers") and torch is None:
        return Path(sys.executable)
    folder = root / ".venv-compat" / (f"{version}-torch-{torch}" if torch else version)
    python = folder / "bin/python"
    done = folder / "installed"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        own = folder / f"lib/python{sysconfig.get_python_version()}/site-packages"
        # after its own packages, which therefore take precedence
        shared = [*([install_torch(torch, python)] if torch else []), sysconfig.get_paths()["purelib"]]
        (own / "shared.pth").write_text("".join(f"import site; site.addsitedir({str(path)!r})\n" for path in shared))
        requirements = [f"transformers=={version}"]
        if version.startswith("4."):
            requirements.append(
                "datasets<4.5"
            )  # Trainer imports it; newer versions need the huggingface_hub of transformers 5
        install = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-compile",
            *requirements,
        ]
        subprocess.run([*install, "--constraint", write_constraints(folder)], check=True)
        done.touch()
    return python


def install_torch(version: str, python: Path) -> Path:
    """Install torch into a separate folder, with the CUDA libraries that its Linux build imports."""
    folder = root / ".venv-compat" / f"torch-{version}"
    if not (folder / "installed").exists():
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        subprocess.run([*install, "--target", folder, f"torch=={version}"], check=True)
        (folder / "installed").touch()
    return folder


def write_constraints(folder: Path) -> Path:
    """Write the project's constraints without the packages whose versions depend on transformers."""
    free = ("transformers", "tokenizers", "huggingface_hub", "datasets")
    lines = (root / "constraints.txt").read_text().splitlines()
    kept = folder / "constraints.txt"
    kept.write_text("\n".join(line for line in lines if not line.startswith(free)))
    return kept


def main(version: str, torch: str | None = None) -> int:
    """Run the marked tests and return pytest's exit status."""
    python = environment(version, torch)
    found = subprocess.run(
        [python, "-c", "import transformers, torch; print(transformers.__version__, torch.__version__)"],
        check=True,
        capture_output=True,
        text=True,
        cwd=root,
    ).stdout.strip()
    print(f"transformers and torch: {found}", flush=True)
    if found.split()[0] != version or not found.split()[1].startswith(torch or ""):
        sys.exit(
            f"found transformers and torch {found}, expected {version} and {torch or 'any'}; remove .venv-compat and run again"
        )
    return subprocess.run(
        [python, "-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal", "-m", "compat and not gpu", "tests"],
        cwd=root,
    ).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
