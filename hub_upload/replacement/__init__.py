"""Replace the code of a repository in the published layout, such as `chandar-lab/NeoBERT`, and leave its weights untouched.

- Our code files are added, and `auto_map` in config.json names their classes. Every other key stays.
- The file that `auto_map` named, such as model.py, becomes a list of the same names, imported from our files: the configs of
  fine-tunes in other repositories name it too, as "org/name--model.NeoBERT", and load its newest version.
- Files that only the old code imported are deleted. Code that another file of the repository names stays as it is.
"""

import json
import re
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import snapshot_download
from transformers.dynamic_module_utils import custom_object_save
from verifying import verify

from neobert_hf import AUTO_CLASSES, NeoBERTConfig, NeoBERTModel
from neobert_hf.checkpoints.trust import DATA_FILES
from neobert_hf.files import read_json

TEXT = Path(__file__).with_name("pull_request.md")
MEASURED = Path(__file__).parents[2] / "benchmarks/results/drop_in.md"
TITLE = "Model code that works with transformers 5"
IMPORT = re.compile(r"^\s*(?:from|import)\s+\.*(\w+)", re.MULTILINE)
NOT_NAMING = ("tokenizer.json", "vocab.json", "*.index.json")  # they name no code, and may hold any word
PUBLISHED = {"NeoBERT", "NeoBERTLMHead"}  # names of the published code that are not ours


@dataclass(frozen=True)
class Replacement:
    """What `replace_code` did to a folder.

    Attributes:
        written: Names of files: our code, config.json, and the old names.
        aliases: Those of them that list old names.
        deleted: Names of the files that are no longer needed.
        kept: Names of other code that a JSON file of the folder names, so that loading the folder runs it.
        old_code: The text of the code that was replaced.
        new_classes: Auto classes that the folder lacked.
    """

    written: list[str]
    aliases: list[str]
    deleted: list[str]
    kept: list[str]
    old_code: str
    new_classes: list[str]


def plan_drop_in(repo_id: str, folder: Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """Replace the code in a copy of a repository, try it on the weights, and plan the pull request.

    Args:
        repo_id: The repository.
        folder: Empty folder for the copy.
        trust_remote_code: Run code that the repository keeps, such as that of a tokenizer, in the trial.

    Returns:
        Folder, files, title, text, deleted files and parent commit of the pull request.

    Raises:
        ValueError: The repository is not in the published layout, does not load with our code, or keeps code of its own that
            may not run.
        OSError: It cannot be read.
    """
    snapshot = Path(snapshot_download(repo_id, allow_patterns=[*DATA_FILES, "*.py"]))
    shutil.copytree(snapshot, folder, dirs_exist_ok=True)  # files in the place of the cache's links
    replacement = replace_code(folder, repo_id)
    if replacement.kept and not trust_remote_code:
        raise ValueError(
            f"{repo_id} keeps {', '.join(replacement.kept)}, code of its own that would run when the result is tried; read it, "
            "and add --trust-remote-code if it may run here"
        )
    report = verify(folder)
    if not report["ok"]:
        raise ValueError(f"{repo_id} does not load with the code of this package: {report['error']}; nothing was sent")
    text = jinja2.Template(TEXT.read_text("utf-8"), trim_blocks=True, undefined=jinja2.StrictUndefined).render(
        repo_id=repo_id,
        commit=snapshot.name,
        version=metadata.version("neobert_hf"),
        measured=MEASURED.read_text("utf-8").strip() if MEASURED.is_file() else None,
        replacement=replacement,
        left=sorted(file.name for file in folder.glob("*.py") if file.name not in replacement.written),
        report=report,
    )
    plan = {"folder": folder, "files": replacement.written, "title": TITLE, "text": text}
    return plan | {"deleted": tuple(replacement.deleted), "parent_commit": snapshot.name}


def replace_code(folder: Path, repo_id: str) -> Replacement:
    """Replace the code in a folder in the published layout.

    Args:
        folder: The folder; its weights are not read.
        repo_id: Its repository, whose id may stand before the names in `auto_map`.

    Raises:
        ValueError: It is not a NeoBERT, or has model classes that this package lacks.
        OSError: It has no config.json.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{repo_id} has no config.json at its root, so it is not in the published layout")
    config, text = read_json(folder / "config.json"), (folder / "config.json").read_text("utf-8")
    if not isinstance(config, dict) or not isinstance(config.get("auto_map") or {}, dict):
        raise ValueError(
            f"config.json of {repo_id} is not the config of a model: it, or its auto_map, is not an object"
        )
    NeoBERTConfig.from_pretrained(folder)  # refuses other models
    code = {file.name: file.read_text("utf-8", errors="replace") for file in folder.glob("*.py")}
    old_map = config.get("auto_map") or {}
    names = _classes_by_file(old_map, repo_id)
    old = _reachable(names.keys() & code.keys(), code)

    ours = {Path(file).name for file in custom_object_save(NeoBERTModel, folder)}
    auto_map = {
        name: f"{loaded.__module__.rpartition('.')[2]}.{loaded.__name__}" for name, loaded in AUTO_CLASSES.items()
    }
    config["auto_map"] = old_map | auto_map
    changed = json.dumps(config, indent=2, ensure_ascii=False) + "\n" * text.endswith("\n")
    (folder / "config.json").write_text(changed, "utf-8")

    named = (_named_files(folder, repo_id) & code.keys()) - ours
    kept = _reachable((code.keys() - old) | named, code)
    aliases = sorted(names.keys() & code.keys() - kept - ours)
    for name in aliases:
        (folder / name).write_text(
            '"""The names of modeling_neobert.py, for configs that name this file in their auto_map."""\n\n'
            f"from .modeling_neobert import {', '.join(sorted(names[name]))}\n",
            "utf-8",
        )
    deleted = sorted(old - kept - ours - set(aliases))
    for name in deleted:
        (folder / name).unlink()
    written = sorted({"config.json", *ours, *aliases})
    old_code = "\n".join(code[name] for name in sorted(old))
    new_classes = [name for name in auto_map if name not in old_map]
    return Replacement(written, aliases, deleted, sorted(named), old_code, new_classes)


def _classes_by_file(auto_map: dict[str, Any], repo_id: str) -> dict[str, set[str]]:
    """The classes that an `auto_map` names for models and config, by file of the repository.

    Raises:
        ValueError: This package has no such class.
    """
    names = {}
    for auto_class, reference in auto_map.items():
        if not auto_class.startswith(("AutoConfig", "AutoModel")):
            continue
        place, _, path = str(reference).rpartition("--")
        module, _, name = path.partition(".")
        if name not in PUBLISHED.union(each.__name__ for each in AUTO_CLASSES.values()):
            raise ValueError(
                f"config.json of {repo_id} names {reference} for {auto_class}, a class that this package does not have; "
                "its own code would be lost, so it is not replaced"
            )
        if place in ("", repo_id):
            names.setdefault(f"{module}.py", set()).add(name)
    return names


def _named_files(folder: Path, repo_id: str) -> set[str]:
    """Files of code that a JSON file of the folder names, as in "module.Class"."""
    files = [file for file in folder.rglob("*.json") if not any(file.match(pattern) for pattern in NOT_NAMING)]
    reference = re.compile(rf'"(?:{re.escape(repo_id)}--)?(\w+)\.[A-Z]\w*"')
    return {f"{module}.py" for file in files for module in reference.findall(file.read_text("utf-8", "replace"))}


def _reachable(names: set[str], code: dict[str, str]) -> set[str]:
    """`names`, and the files of `code` that these import, directly or not."""
    found = set()
    while names:
        found |= names
        names = {f"{module}.py" for name in names for module in IMPORT.findall(code[name])} & code.keys() - found
    return found
