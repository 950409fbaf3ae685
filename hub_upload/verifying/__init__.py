"""Verify a Hub folder in a clean process: every Auto class must load from the folder's code, without the installed package.

`verify` runs this file as a script in that process, so it imports nothing of the package at its top.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Environment variables that Python and torch need to start, also on Windows. The folder's code gets no other variables.
PASSED_ON = ("PATH", "SYSTEMROOT", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "OMP_NUM_THREADS")


def verify(folder: str | Path) -> dict[str, Any]:
    """Load a folder in a process that cannot import neobert_hf.

    `check_own_code` reads the folder before that, so code of another place never runs. The folder's code gets no token: its
    environment holds none, and its home folder is empty. It can still read every file that this user can read.

    Returns:
        `ok`; if it is false, `error`. Otherwise `classes` by Auto class; `new_heads`, the Auto classes whose head has no weights
        in the folder; `own`, the folder's own Auto class, and a summary of its `output`; for a folder of sentence-transformers
        also `embedding`, a summary of what its own class computes.
    """
    try:
        if not Path(folder, "config.json").is_file():  # transformers looks for code beside it, and never in a subfolder
            raise ValueError(f"{folder} has no config.json; give the folder of a model, which has it at its root")
        check_own_code(Path(folder))
    except (OSError, ValueError) as error:
        return {"ok": False, "folder": str(folder), "error": str(error)}
    with tempfile.TemporaryDirectory() as home:  # an empty cache, without code of an earlier run
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment |= dict.fromkeys(("HOME", "USERPROFILE", "HF_HOME", "TMPDIR", "TEMP", "TMP"), home)
        environment["HF_HUB_OFFLINE"] = "1"
        command = [sys.executable, "-I", __file__, str(Path(folder).resolve())]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
    try:
        return json.loads(run.stdout.splitlines()[-1]) | {"folder": str(folder)}
    except (IndexError, TypeError, ValueError):  # the process was killed, or the folder's code ended it
        reason = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
        return {"ok": False, "folder": str(folder), "error": reason[-1]}


def check_own_code(folder: Path) -> None:
    """Refuse a folder that makes transformers or sentence-transformers run code, or read weights, of another place.

    Nothing is loaded. The code in the folder itself is not judged.

    Raises:
        ValueError: A JSON file names such a place or is damaged, or `check_links` refuses the folder.
    """
    from neobert_hf.checkpoints import check_links  # not in the other process
    from neobert_hf.checkpoints.trust import foreign_settings

    check_links(folder)
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} holds an adapter, whose base model is elsewhere; merge it and save the model")
    for file in sorted(folder.rglob("*.json")):
        for key, value in foreign_settings(file):
            raise ValueError(f"{file} names foreign code: {key} is {json.dumps(value)}; save the model by this library")


def load_every_class(folder: str) -> dict[str, Any]:
    """Load the tokenizer and every class of the folder's `auto_map`, and run a forward of each.

    Raises:
        RuntimeError: A class does not load from the folder's own code, lacks weights, or returns values that are not finite.
    """
    import torch
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    config = json.loads(Path(folder, "config.json").read_text("utf-8"))
    auto_map, own_class = config.get("auto_map"), next(iter(config.get("architectures") or ()), None)
    if not auto_map:
        raise RuntimeError("config.json names no code (auto_map); build the folder with hub_upload/build.py")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    check_module(tokenizer, "transformers.", "transformers_modules.")
    inputs = tokenizer(["one two three", "four"], padding=True, return_tensors="pt")
    loaded = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    check_module(loaded, "transformers_modules.")
    published_names = getattr(sys.modules[type(loaded).__module__], "PUBLISHED_ARCHITECTURES", {})
    classes, outputs, new_heads = {"AutoConfig": type(loaded).__name__}, {}, []
    for auto_class in (name for name in auto_map if name.startswith("AutoModel")):
        # A head of another task is newly initialized, whatever shape the folder's own head has.
        options = {"trust_remote_code": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
        model, info = getattr(transformers, auto_class).from_pretrained(folder, **options)
        check_module(model, "transformers_modules.")
        classes[auto_class] = name = type(model).__name__
        rows = {key: value[None] for key, value in inputs.items()} if "Multiple" in auto_class else inputs
        with torch.no_grad():
            output = summarize(model.eval()(**rows)[0], auto_class)
        if not (info["missing_keys"] or info["mismatched_keys"]):
            outputs[auto_class] = output
        elif own_class in (name, published_names.get(name)):
            raise RuntimeError(f"{auto_class} is the folder's own class, but its weights are incomplete: {info}")
        else:
            new_heads.append(auto_class)
    if not outputs:
        raise RuntimeError(f"no class of auto_map finds all of its weights in the folder: {', '.join(classes)}")
    is_own = {name: own_class in (classes[name], published_names.get(classes[name])) for name in outputs}
    own = max(outputs, key=lambda name: is_own[name])  # the first one, if config.json names no architecture
    for name in published_names.values():
        module = auto_map[own].split(".")[0]
        classes[name] = get_class_from_dynamic_module(f"{module}.{name}", folder).__name__
    report = {"ok": True, "transformers": transformers.__version__, "tokenizer": type(tokenizer).__name__}
    report |= {"classes": classes, "new_heads": new_heads, "own": own, "output": outputs[own]}
    if Path(folder, "modules.json").is_file():
        report["embedding"] = load_embedding_model(folder)
    return report


def check_module(loaded: Any, *places: str) -> None:
    """Raise RuntimeError if the class of an object is of another place."""
    if not (module := type(loaded).__module__).startswith(places):
        raise RuntimeError(f"{type(loaded).__name__} was loaded from {module}, not from the folder")


def load_embedding_model(folder: str) -> dict[str, Any]:
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
    return {"class": kind, **summarize(output.to_dense() if output.is_sparse else output, kind)}


def summarize(output: Any, name: str = "it") -> dict[str, Any]:
    """Return shape, norm and first values of a tensor; a checksum would depend on the number of threads.

    Raises:
        RuntimeError: A value is not finite.
    """
    if not output.isfinite().all():
        raise RuntimeError(f"{name} returns values that are not finite")
    output = output.double()
    return {"shape": list(output.shape), "norm": output.norm().item(), "first_values": output.flatten()[:8].tolist()}


if __name__ == "__main__":
    sys.modules["neobert_hf"] = None  # type: ignore[assignment]  # importing the package now fails
    try:
        found = load_every_class(sys.argv[1])
    except Exception as error:  # of any library or code: this process reports it
        found = {"ok": False, "error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    sys.stdout.write(f"{json.dumps(found)}\n")
