"""Publish on the Hub by a pull request: the model in a folder, or the code of a repository in the published layout.

    python hub_upload/push.py FOLDER org/name
    python hub_upload/push.py FOLDER org/name --push
    python hub_upload/push.py --drop-in org/name --push

Without --push nothing is sent: the command prints each file with its size, and the text of the pull request.
"""

import argparse
import re
import tempfile
from glob import escape
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import disable_progress_bars, filter_repo_objects, validate_repo_id
from huggingface_hub.utils import logging as hub_logging
from replacement import plan_drop_in
from verifying import verify

from neobert_hf.checkpoints import check_links
from neobert_hf.files import one_line, printable, run_command

PARTS = ["*.json", "*.safetensors", "*.py", "*.md", "*.txt", "*.model", "*.jinja", "*.onnx", "*.gguf", "*.png", "*.svg"]
PARTS += ["LICENSE", "LICENCE", "NOTICE"]
# Hidden files, and what a training leaves beside a model: its state, its record with the names of your files, and its logs.
NO_PARTS = [".*", "*/.*", "checkpoint-*", "global_step*", "optimizer*", "scheduler*", "run.json", "trainer_state.json"]
NO_PARTS += ["*/checkpoint-*", "runs/*", "wandb/*", "training.json", "*/training.json"]
SUMMARIES = ["training_summary.json", "*/training_summary.json"]  # of a training, unless the sources are published too
LARGE = (".safetensors", ".onnx", ".gguf")
TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{30,}")
TEXT = """
Weights, config, tokenizer and the model's own code. Every Auto class was loaded from these files in a process without an
installed package, under transformers {transformers}, and returned finite values: {classes}.

Check it yourself; N is the number of this pull request:

```python
from transformers import {own}

model = {own}.from_pretrained("{repo_id}", revision="refs/pr/N", trust_remote_code=True)
```
"""


def model_files(folder: Path) -> list[str]:
    """Return the names of the files of a folder, all of which are to be published.

    Raises:
        ValueError: One of them is no part of a model, or has a token of the Hub in it, or `check_links` refuses the folder.
        OSError: There is no such folder.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder; give one that hub_upload/build.py has written")
    check_links(folder)
    names = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if not file.is_dir()]
    names = [name for name in names if name != ".gitattributes"]  # the Hub makes it
    refused = NO_PARTS if (folder / "sources.json").is_file() else NO_PARTS + SUMMARIES
    parts = set(filter_repo_objects(names, allow_patterns=PARTS, ignore_patterns=refused))
    if other := [name for name in names if name not in parts]:
        more = f" ({len(other) - 1} more such files)" if len(other) > 1 else ""
        raise ValueError(
            f"{folder} holds {other[0]}, which is no part of a published model{more}; push a folder that hub_upload/build.py "
            "has written"
        )
    for name in names:
        if not name.endswith(LARGE) and TOKEN.search((folder / name).read_bytes()):
            raise ValueError(
                f"{folder} holds {name}, which has a token of the Hub in it; remove the token, and revoke it"
            )
    return names


def plan_push(repo_id: str, folder: Path) -> dict[str, Any]:
    """Check a folder, and plan the pull request that publishes it; the Hub is not asked.

    Returns:
        Folder, files, title and text of the pull request.

    Raises:
        ValueError: The folder is refused by `model_files` or by `verify`.
        OSError: The folder cannot be read.
    """
    files, report = model_files(folder), verify(folder)
    if not report["ok"]:
        raise ValueError(f"{folder} does not pass hub_upload/verify.py: {report['error']}")
    text = TEXT.format(**report | {"classes": ", ".join(report["classes"]), "repo_id": repo_id})
    return {"folder": folder, "files": files, "title": f"Upload {repo_id.partition('/')[2]}", "text": text}


def open_pull_request(repo_id: str, plan: dict[str, Any], create: str | None = None) -> str | None:
    """Open a pull request with one commit, which has all of the files or does not exist.

    Args:
        repo_id: Its repository.
        plan: As of `plan_push` or `plan_drop_in`. Files that the repository has already are not sent again.
        create: Create the repository first, "private" or "public", if it does not exist.

    Returns:
        Its address; None if the repository has these files already, so that there is nothing to send.

    Raises:
        OSError: The Hub cannot be reached, or refuses the commit.
    """
    api = HfApi()
    try:
        if create:
            api.create_repo(repo_id, private=create == "private", exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=plan["folder"],
            allow_patterns=[escape(name) for name in plan["files"]],
            delete_patterns=[escape(name) for name in plan.get("deleted", ())],
            commit_message=plan["title"],
            commit_description=plan["text"],
            create_pr=True,
            parent_commit=plan.get("parent_commit"),
        ).pr_url
    # The first base of HfHubHTTPError is the base of all errors of the HTTP library, which differs between versions.
    except (OSError, RuntimeError, *HfHubHTTPError.__bases__) as error:
        # An upload raises a RuntimeError from the answer of the Hub.
        reason = one_line(error if isinstance(error, HfHubHTTPError) else error.__cause__ or error)
        raise OSError(
            f"{repo_id}: {reason}; `hf auth login` saves a token, --create private creates a "
            f"repository, and {api.endpoint}/{repo_id}/discussions lists the pull request if it was opened"
        ) from error


def run(arguments: argparse.Namespace) -> None:
    """Print the pull request, and open it if this is asked for."""
    hub_logging.set_verbosity_error()  # it would tell of each repeated request
    disable_progress_bars()
    repo_id = arguments.drop_in or arguments.repo_id
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"{repo_id} has no owner; give the id of a repository, such as org/{repo_id}")
    with tempfile.TemporaryDirectory() as workspace:
        if arguments.drop_in:
            plan = plan_drop_in(repo_id, Path(workspace), arguments.trust_remote_code)
        else:
            plan = plan_push(repo_id, Path(arguments.folder))
        print(f"{repo_id}:")
        for name in plan["files"]:
            print(f"  {(plan['folder'] / name).stat().st_size:>13,} bytes  {printable(name)}")
        for name in plan.get("deleted", ()):
            print(f"  {'deleted':>19}  {printable(name)}")
        text = "\n".join(map(printable, plan["text"].strip().splitlines()))
        print(f"\nPull request: {printable(plan['title'])}\n\n{text}\n")
        if not arguments.push:
            print("This was a dry run, and nothing was sent; --push opens this pull request")
        elif address := open_pull_request(repo_id, plan, arguments.create):
            print(f"opened {address}")
        else:
            print(f"{repo_id} has these files already; no pull request was opened")


def main() -> None:
    """Plan the pull request, print it, and open it with --push."""
    usage = "%(prog)s FOLDER org/name [--push]\n       %(prog)s --drop-in org/name [--push]"
    parser = argparse.ArgumentParser(usage=usage, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("folder", nargs="?", help="Folder that hub_upload/build.py has written.")
    add("repo_id", nargs="?", help="Repository on the Hub, such as org/name.")
    add("--drop-in", metavar="org/name", help="Replace the code of this repository; its weights stay.")
    add("--trust-remote-code", action="store_true", help="With --drop-in: run code that it keeps, in a trial.")
    add("--push", action="store_true", help="Open the pull request. Without it nothing is sent.")
    add("--create", choices=("private", "public"), help="With --push: create the repository if it does not exist.")
    arguments = parser.parse_args()
    if bool(arguments.drop_in) == bool(arguments.repo_id) or bool(arguments.drop_in) == bool(arguments.folder):
        parser.error("give FOLDER and org/name, or --drop-in org/name alone")
    if arguments.create and (arguments.drop_in or not arguments.push):
        parser.error("--create belongs to FOLDER org/name --push")
    run_command(parser.prog, run, arguments)


if __name__ == "__main__":
    main()
