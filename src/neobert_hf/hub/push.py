"""Publish on the Hub by a pull request: the model in a folder, or the code of a repository in the published layout.

    python hub_upload/push.py FOLDER org/name
    python hub_upload/push.py FOLDER org/name --push
    python hub_upload/push.py --drop-in org/name --push

Without --push nothing is sent: the command prints each file with its size and its hash, and the text of the pull request.
"""

import argparse
import re
import tempfile
from pathlib import Path

from huggingface_hub.utils import filter_repo_objects
from huggingface_hub.utils import logging as hub_logging

from ..files.trust import check_links
from ..runs.commands import CommandParser, run_command
from .build import RECORD
from .drop_in import plan_drop_in
from .pull_requests import PullRequest, check_id, open_pull_request
from .verify import verify

PARTS = ["*.json", "*.safetensors", "*.py", "*.md", "*.txt", "*.model", "*.jinja", "*.onnx", "*.gguf", "*.png", "*.svg"]
PARTS += ["LICENSE", "LICENCE", "NOTICE"]
# Hidden files, and what a training leaves beside a model: its state, its record with the names of your files, and its logs.
NO_PARTS = [".*", "*/.*", "checkpoint-*", "global_step*", "optimizer*", "scheduler*", "run.json", "trainer_state.json"]
NO_PARTS += ["*/checkpoint-*", "runs/*", "wandb/*"]
LARGE = (".safetensors", ".onnx", ".gguf")
TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{30,}")


def model_files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder by name, all of which are to be published.

    Raises:
        ValueError: One of them is no part of a model, or has a token of the Hub in it, or `check_links` refuses the folder.
        OSError: There is no such folder.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder; give one that hub_upload/build.py has written")
    check_links(folder)
    files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if not file.is_dir()}
    for name in (RECORD, ".gitattributes"):  # the Hub makes the second one itself
        files.pop(name, None)
    parts = set(filter_repo_objects(files, allow_patterns=PARTS, ignore_patterns=NO_PARTS))
    if other := [name for name in files if name not in parts]:
        more = f" ({len(other) - 1} more such files)" if len(other) > 1 else ""
        raise ValueError(
            f"{folder} holds {other[0]}, which is no part of a published model{more}; push a folder that hub_upload/build.py "
            "has written"
        )
    for name, file in files.items():
        if file.suffix not in LARGE and TOKEN.search(file.read_bytes()):
            raise ValueError(
                f"{folder} holds {name}, which has a token of the Hub in it; remove the token, and revoke it"
            )
    return files


def plan_push(folder: Path, repo_id: str) -> PullRequest:
    """Check a folder, and plan the pull request that publishes it; the Hub is not asked.

    Args:
        folder: A folder that `build` has written.
        repo_id: Its repository on the Hub.

    Raises:
        ValueError: The folder is refused by `model_files` or by `verify`.
        OSError: The folder cannot be read.
    """
    check_id(repo_id)
    files = model_files(folder)
    report = verify(str(folder))
    if not report["ok"]:
        raise ValueError(f"{folder} does not pass hub_upload/verify.py: {report['error']}")
    auto_class = report["own"]
    text = f"""
Weights, config, tokenizer and the model's own code. Every Auto class was loaded from these files in a process without an
installed package, under transformers {report["transformers"]}, and returned finite values: {", ".join(report["classes"])}.

Check it yourself; N is the number of this pull request:

```python
from transformers import {auto_class}

model = {auto_class}.from_pretrained("{repo_id}", revision="refs/pr/N", trust_remote_code=True)
```
"""
    return PullRequest(repo_id, f"Upload {Path(repo_id).name}", text, files)


def run(arguments: argparse.Namespace) -> None:
    """Print the pull request, and open it if this is asked for."""
    hub_logging.set_verbosity_error()  # it would tell of each repeated request
    with tempfile.TemporaryDirectory() as workspace:
        if arguments.drop_in:
            request = plan_drop_in(arguments.drop_in, Path(workspace), arguments.trust_remote_code)
        else:
            request = plan_push(Path(arguments.folder), arguments.repo_id)
        print(request, end="\n\n")
        if not arguments.push:
            print("This was a dry run, and nothing was sent; --push opens this pull request")
        elif address := open_pull_request(request, arguments.create):
            print(f"opened {address}")
        else:
            print(f"{request.repo_id} has these files already; no pull request was opened")


def main() -> None:
    """Plan the pull request, print it, and open it with --push."""
    usage = "%(prog)s FOLDER org/name [--push]\n       %(prog)s --drop-in org/name [--push]"
    parser = CommandParser([], prog="push.py", usage=usage, description=__doc__)
    add = parser.add_argument
    add("folder", nargs="?", help="Folder that hub_upload/build.py has written.")
    add("repo_id", nargs="?", help="Repository on the Hub, such as org/name.")
    add("--drop-in", metavar="org/name", help="Replace the code of this repository; its weights stay.")
    add(
        "--trust-remote-code",
        action="store_true",
        help="With --drop-in: run code that the repository keeps, in a trial.",
    )
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
