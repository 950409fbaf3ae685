"""Verify a Hub folder in a clean process: every Auto class must load from the folder's code, without the installed package.

    python hub_upload/verify.py HUB_DIR

Nothing is loaded if a file names code of another place. The last line of output is one line of JSON: `ok`, the classes, the
Auto classes whose head has no weights in the folder (`new_heads`), and a summary of the output of the folder's own class, for
comparison with the output of the package. The exit status is 1 if `ok` is false.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# Environment variables that Python and torch need to start, also on Windows. The folder's code gets no other variables.
PASSED_ON = ("PATH", "SYSTEMROOT", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "OMP_NUM_THREADS")


def verify(folder: str) -> dict:
    """Load `folder` in a process that cannot import neobert_hf, and return the report of that process.

    `check_own_code` reads the folder before that, so code of another place never runs. The folder's code gets no token: its
    environment holds none, and its home folder is empty. It can still read every file that this user can read.
    """
    from ..data.origins import check_own_code  # not in the other process, which runs this file as a script

    try:
        check_own_code(Path(folder))
    except (OSError, ValueError) as error:
        return {"ok": False, "folder": str(folder), "error": str(error)}
    with tempfile.TemporaryDirectory() as home:  # an empty cache, without code of an earlier run
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment |= dict.fromkeys(("HOME", "USERPROFILE", "HF_HOME", "TMPDIR", "TEMP", "TMP"), home)
        environment["HF_HUB_OFFLINE"] = "1"
        run = subprocess.run(
            [sys.executable, "-I", __file__, "--in_this_process", str(Path(folder).resolve())],
            env=environment,
            capture_output=True,
            text=True,
        )
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        reason = run.stderr.strip().splitlines()
        return {"ok": False, "folder": str(folder), "error": reason[-1] if reason else f"exit status {run.returncode}"}
    return json.loads(lines[-1])


def load_every_class(folder: str) -> dict:
    """Load every class of the folder's `auto_map`, run a forward of each, and check that its code is the folder's."""
    sys.modules["neobert_hf"] = None  # importing the package now fails

    import torch
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    config = json.loads(Path(folder, "config.json").read_text("utf-8"))
    if "auto_map" not in config:
        raise RuntimeError("config.json names no code (auto_map); build the folder with hub_upload/build.py")
    auto_map, own_class = config["auto_map"], config["architectures"][0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    inputs = tokenizer(["one two three", "four"], padding=True, return_tensors="pt")
    if not (kind := type(tokenizer).__module__).startswith(("transformers.", "transformers_modules.")):
        raise RuntimeError(f"the tokenizer was loaded from {kind}, neither from transformers nor from the folder")
    classes, new_heads, own_output = {}, [], None
    for auto_class in auto_map:
        load = getattr(transformers, auto_class).from_pretrained
        if auto_class == "AutoConfig":
            loaded, info = load(folder, trust_remote_code=True), {}
        else:  # a head of another task is newly initialized, whatever shape the folder's own head has
            options = {"ignore_mismatched_sizes": True, "output_loading_info": True}
            loaded, info = load(folder, trust_remote_code=True, **options)
        name, module = type(loaded).__name__, type(loaded).__module__
        if not module.startswith("transformers_modules."):
            raise RuntimeError(f"{auto_class} was loaded from {module}, not from the folder")
        classes[auto_class] = name
        if auto_class == "AutoConfig":
            published_names = getattr(sys.modules[module], "PUBLISHED_ARCHITECTURES", {})
            continue
        rows = {key: value[None] for key, value in inputs.items()} if "Multiple" in auto_class else inputs
        with torch.no_grad():
            output = loaded.eval()(**rows)[0]
        if not output.isfinite().all():
            raise RuntimeError(f"{auto_class} returns values that are not finite")
        is_own = own_class in (name, published_names.get(name))
        if info["missing_keys"] or info["mismatched_keys"]:
            if is_own:
                raise RuntimeError(f"{auto_class} is the folder's own class, but its weights are incomplete: {info}")
            new_heads.append(auto_class)
        elif is_own:
            own_output = summarize(output)
    module = auto_map["AutoModel"].split(".")[0]
    for name in published_names.values():
        classes[name] = get_class_from_dynamic_module(f"{module}.{name}", folder).__name__
    report = {
        "ok": True,
        "folder": folder,
        "transformers": transformers.__version__,
        "tokenizer": type(tokenizer).__name__,
    }
    return {**report, "classes": classes, "new_heads": new_heads, "output": own_output}


def summarize(output) -> dict:
    """Return shape, norm and first values of a tensor; a checksum would depend on the number of threads."""
    output = output.double()
    return {"shape": list(output.shape), "norm": output.norm().item(), "first_values": output.flatten()[:8].tolist()}


def main() -> None:
    """Verify the folder and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="Folder that hub_upload/build.py has written.")
    parser.add_argument("--in_this_process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not Path(arguments.folder).is_dir():
        parser.error(f"{arguments.folder!r} is not a folder; give a folder that hub_upload/build.py has written")
    report = (load_every_class if arguments.in_this_process else verify)(arguments.folder)
    print(json.dumps(report))
    sys.exit(not report["ok"])


if __name__ == "__main__":
    main()
