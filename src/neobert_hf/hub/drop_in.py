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

from ..data.origins import read_json
from ..model import modeling_neobert
from ..model.configuration_neobert import NeoBERTConfig
from ..model.modeling_neobert import AUTO_CLASSES, NeoBERTModel
from .build import READ
from .repositories import PullRequest, check_id, compare, explained, read_repository
from .verify import verify

TEXT = Path(__file__).with_name("drop_in.md")
TITLE = "Model code that works with transformers 5"
IMPORT = re.compile(r"^\s*(?:from|import)\s+\.*(\w+)", re.MULTILINE)
DATA = ("tokenizer.json", "vocab.json", "*.index.json")  # they name no code, and may hold any word


@dataclass(frozen=True)
class Replacement:
    """What `replace_code` did to a folder.

    Attributes:
        written: Files by name: our code, config.json, and the old names.
        aliases: Those of them that list old names.
        deleted: Names of the files that are no longer needed.
        kept: Names of other code that a JSON file of the folder names, so that loading the folder runs it.
        old_code: The text of the code that was replaced.
        new_classes: Auto classes that the folder lacked.
    """

    written: dict[str, Path]
    aliases: list[str]
    deleted: list[str]
    kept: list[str]
    old_code: str
    new_classes: list[str]


def plan_drop_in(
    repo_id: str,
    folder: Path,
    revision: str | None = None,
    measured: str | None = None,
    tries_old_code: bool = False,
) -> PullRequest:
    """Replace the code in a copy of a repository, try it on the weights, and plan the pull request.

    Args:
        repo_id: The repository.
        folder: Empty folder for the copy.
        revision: Branch or commit to start from; by default main.
        measured: File with a table of errors in Markdown, for the text.
        tries_old_code: Let code of the repository run, in a process without a token: the present code, whose result the text
            tells, and code that stays, such as that of a tokenizer.

    Raises:
        ValueError: The repository is not in the published layout, does not load with our code, or keeps code of its own that
            may not run.
        OSError: It cannot be read.
    """
    check_id(repo_id)
    table = Path(measured).read_text("utf-8").strip() if measured else None
    repository = read_repository(repo_id, revision)
    if repository.commit is None:
        raise OSError(f"{repo_id}: {repository.fault}; nothing was sent")
    with explained(repo_id):
        snapshot = snapshot_download(repo_id, revision=repository.commit, allow_patterns=[*READ, "*.py"])
    shutil.copytree(snapshot, folder, dirs_exist_ok=True)  # files in the place of the cache's links
    before = verify(str(folder)) if tries_old_code else None
    replacement = replace_code(folder, repo_id)
    if replacement.kept and not tries_old_code:
        raise ValueError(
            f"{repo_id} keeps {', '.join(replacement.kept)}, code of its own that would run when the result is tried; read it, "
            "and add --try-old-code if it may run here"
        )
    report = verify(str(folder))
    if not report["ok"]:
        raise ValueError(f"{repo_id} does not load with the code of this package: {report['error']}; nothing was sent")
    changes = compare(replacement.written, repository, replacement.deleted)
    text = jinja2.Template(TEXT.read_text("utf-8"), trim_blocks=True, undefined=jinja2.StrictUndefined).render(
        repo_id=repo_id,
        commit=repository.commit,
        version=metadata.version("neobert_hf"),
        measured=table,
        replacement=replacement,
        left=[change.name for change in changes if change.state == "left alone" and change.name.endswith(".py")],
        before=before,
        fault=before and before.get("error", "").replace(str(folder.resolve()), repo_id),
        report=report,
    )
    return PullRequest(repository, changes, TITLE, text)


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
    names = _classes_by_file(config.get("auto_map") or {}, repo_id)
    old = _reachable(names.keys() & code.keys(), code)

    ours = {Path(file).name: Path(file) for file in custom_object_save(NeoBERTModel, folder)}
    auto_map = {
        name: f"{loaded.__module__.rpartition('.')[2]}.{loaded.__name__}" for name, loaded in AUTO_CLASSES.items()
    }
    new_classes = [name for name in auto_map if name not in (config.get("auto_map") or {})]
    config["auto_map"] = (config.get("auto_map") or {}) | auto_map
    changed = json.dumps(config, indent=2, ensure_ascii=False) + "\n" * text.endswith("\n")
    (folder / "config.json").write_text(changed, "utf-8")

    named = (_named_files(folder, repo_id) & code.keys()) - ours.keys()
    kept = _reachable((code.keys() - old) | named, code)
    aliases = sorted(names.keys() & code.keys() - kept - ours.keys())
    for name in aliases:
        (folder / name).write_text(
            '"""The names of modeling_neobert.py, for configs that name this file in their auto_map."""\n\n'
            f"from .modeling_neobert import {', '.join(sorted(names[name]))}\n",
            "utf-8",
        )
    deleted = sorted(old - kept - ours.keys() - set(aliases))
    for name in deleted:
        (folder / name).unlink()
    written = ours | {name: folder / name for name in ("config.json", *aliases)}
    old_code = "\n".join(code[name] for name in sorted(old))
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
        if not hasattr(modeling_neobert, name):
            raise ValueError(
                f"config.json of {repo_id} names {reference} for {auto_class}, a class that this package does not have; "
                "its own code would be lost, so it is not replaced"
            )
        if place in ("", repo_id):
            names.setdefault(f"{module}.py", set()).add(name)
    return names


def _named_files(folder: Path, repo_id: str) -> set[str]:
    """Files of code that a JSON file of the folder names, as in "module.Class"."""
    files = [file for file in folder.rglob("*.json") if not any(file.match(pattern) for pattern in DATA)]
    reference = re.compile(rf'"(?:{re.escape(repo_id)}--)?(\w+)\.[A-Z]\w*"')
    return {f"{module}.py" for file in files for module in reference.findall(file.read_text("utf-8", "replace"))}


def _reachable(names: set[str], code: dict[str, str]) -> set[str]:
    """`names`, and the files of `code` that these import, directly or not."""
    found = set()
    while names:
        found |= names
        names = {f"{module}.py" for name in names for module in IMPORT.findall(code[name])} & code.keys() - found
    return found
