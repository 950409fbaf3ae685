"""Verify a Hub folder in a clean process: every Auto class must load from the folder's code, without the installed package.

    python hub_upload/verify.py HUB_DIR

Nothing is loaded if a file names code of another place. The last line of output is one line of JSON: `ok`, the classes, the
Auto classes whose head has no weights in the folder (`new_heads`), the folder's own Auto class (`own`), and a summary of its
output, for comparison with the output of the package. A folder of sentence-transformers is opened by its own class too
(`embedding`). The exit status is 1 if `ok` is false.
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
    from ..files.trust import check_own_code  # not in the other process, which runs this file as a script

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
    try:
        return json.loads(run.stdout.splitlines()[-1]) | {"folder": str(folder)}
    except (IndexError, TypeError, ValueError):  # the process was killed, or the folder's code ended it
        reason = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
        return {"ok": False, "folder": str(folder), "error": reason[-1]}


def load_every_class(folder: str) -> dict:
    """Load every class of the folder's `auto_map`, run a forward of each, and check that its code is the folder's.

    Raises:
        RuntimeError: A class does not load from the folder's own code, lacks weights, or returns values that are not finite.
    """
    sys.modules["neobert_hf"] = None  # importing the package now fails

    import transformers

    if not Path(folder, "config.json").is_file():  # transformers looks for code beside it, and never in a subfolder
        raise RuntimeError(f"{folder} has no config.json; give the folder of a model, which has it at its root")
    config = json.loads(Path(folder, "config.json").read_text("utf-8"))
    if not config.get("auto_map"):
        raise RuntimeError("config.json names no code (auto_map); build the folder with hub_upload/build.py")
    report = {"ok": True, "folder": folder, "transformers": transformers.__version__}
    report |= load_auto_classes(folder, config)
    if Path(folder, "modules.json").is_file():
        report["embedding"] = load_embedding_model(folder)
    return report


def load_auto_classes(folder: str, config: dict) -> dict:
    """Load the tokenizer and every Auto class of `auto_map`; return their classes and the output of the folder's own one."""
    import torch
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    auto_map, own_class = config["auto_map"], next(iter(config.get("architectures") or ()), None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    inputs = tokenizer(["one two three", "four"], padding=True, return_tensors="pt")
    if not (kind := type(tokenizer).__module__).startswith(("transformers.", "transformers_modules.")):
        raise RuntimeError(f"the tokenizer was loaded from {kind}, neither from transformers nor from the folder")
    loaded = load_from_folder(transformers.AutoConfig, folder)
    published_names = getattr(sys.modules[type(loaded).__module__], "PUBLISHED_ARCHITECTURES", {})
    classes, outputs, new_heads = {"AutoConfig": type(loaded).__name__}, {}, []
    for auto_class in (name for name in auto_map if name.startswith("AutoModel")):
        if not hasattr(transformers, auto_class):
            raise RuntimeError(
                f"auto_map names {auto_class}, which transformers {transformers.__version__} does not have"
            )
        # A head of another task is newly initialized, whatever shape the folder's own head has.
        options = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        loaded, info = load_from_folder(getattr(transformers, auto_class), folder, **options)
        classes[auto_class] = name = type(loaded).__name__
        rows = {key: value[None] for key, value in inputs.items()} if "Multiple" in auto_class else inputs
        with torch.no_grad():
            output = loaded.eval()(**rows)[0]
        if not output.isfinite().all():
            raise RuntimeError(f"{auto_class} returns values that are not finite")
        if not (info["missing_keys"] or info["mismatched_keys"]):
            outputs[auto_class] = summarize(output)
        elif own_class in (name, published_names.get(name)):
            raise RuntimeError(f"{auto_class} is the folder's own class, but its weights are incomplete: {info}")
        else:
            new_heads.append(auto_class)
    if not outputs:
        raise RuntimeError(f"no class of auto_map finds all of its weights in the folder: {', '.join(classes)}")
    is_own = {name: own_class in (classes[name], published_names.get(classes[name])) for name in outputs}
    own = max(outputs, key=is_own.get)  # the first one, if config.json names no architecture
    for name in published_names.values():
        module = auto_map[own].split(".")[0]
        classes[name] = get_class_from_dynamic_module(f"{module}.{name}", folder).__name__
    report = {"tokenizer": type(tokenizer).__name__, "classes": classes, "new_heads": new_heads}
    return report | {"own": own, "output": outputs[own]}


def load_from_folder(auto_class: type, folder: str, **options):
    """Load by an Auto class, and check that the code is the folder's; return the object, or the object and its loading info."""
    result = auto_class.from_pretrained(folder, trust_remote_code=True, **options)
    module = type(result[0] if options else result).__module__
    if not module.startswith("transformers_modules."):
        raise RuntimeError(f"{auto_class.__name__} was loaded from {module}, not from the folder")
    return result


def load_embedding_model(folder: str) -> dict:
    """Open a folder of sentence-transformers in the class that made it; return a summary of its output for two texts."""
    import sentence_transformers
    import torch

    settings = Path(folder, "config_sentence_transformers.json")
    kind = json.loads(settings.read_text("utf-8")).get("model_type") if settings.is_file() else None
    kind = kind or "SentenceTransformer"  # older versions name none
    if kind not in ("SentenceTransformer", "SparseEncoder", "MultiVectorEncoder", "CrossEncoder"):
        raise RuntimeError(f"{settings.name} names the model type {kind}, which sentence-transformers does not have")
    model = getattr(sentence_transformers, kind)(folder, device="cpu", trust_remote_code=True)
    compute = model.predict if kind == "CrossEncoder" else model.encode
    texts = [("one two", "three"), ("four", "five")] if kind == "CrossEncoder" else ["one two three", "four"]
    output = compute(texts, convert_to_tensor=True, show_progress_bar=False)
    output = torch.cat(list(output)) if isinstance(output, list) else output  # the vectors of the tokens of each text
    output = output.to_dense() if output.is_sparse else output
    if not output.isfinite().all():
        raise RuntimeError(f"{kind} returns values that are not finite")
    return {"class": kind, **summarize(output)}


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
    if arguments.in_this_process:
        try:
            report = load_every_class(arguments.folder)
        except Exception as error:  # of any library or code: this process reports it
            report = {"ok": False, "error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    else:
        report = verify(arguments.folder)
    print(json.dumps(report))
    sys.exit(not report["ok"])


if __name__ == "__main__":
    main()
