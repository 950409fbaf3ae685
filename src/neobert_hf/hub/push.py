"""Publish on the Hub by a pull request: the model in a folder, or the code of a repository in the published layout.

    python hub_upload/push.py FOLDER org/name
    python hub_upload/push.py FOLDER org/name --push
    python hub_upload/push.py --drop-in org/name --push

Without --push nothing is sent: the command prints each file with its size and its hash, what becomes of it, and the text of the
pull request.
"""

import argparse
import re
import tempfile
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from huggingface_hub.utils import logging as hub_logging

from ..runs.commands import CommandParser, run_command
from .build import RECORD
from .drop_in import plan_drop_in
from .repositories import PullRequest, Repository, check_id, compare, open_pull_request, read_repository
from .verify import verify

PARTS = ("*.json", "*.safetensors", "*.py", "*.md", "*.txt", "*.model", "*.jinja", "*.onnx", "*.gguf", "*.png", "*.svg")
NAMES = (".gitattributes", "LICENSE", "LICENCE", "NOTICE")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.joblib")
# What a training leaves beside a model: its state, its record with the names of your files, and its logs.
OF_A_RUN = (
    "checkpoint-*",
    "global_step*",
    "optimizer*",
    "scheduler*",
    "run.json",
    "trainer_state.json",
    "runs",
    "wandb",
)
TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{30,}")
LARGE = (".safetensors", ".onnx", ".gguf")


def model_files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder by name, all of which are to be published.

    Raises:
        ValueError: One of them is no part of a model, is a pickle, or has a token of the Hub in it.
        OSError: There is no such folder.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder; give one that hub_upload/build.py has written")
    files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if not file.is_dir()}
    files.pop(RECORD, None)
    faults = {name: fault for name, file in files.items() if (fault := _fault(PurePosixPath(name), file))}
    if faults:
        name, fault = next(iter(faults.items()))
        more = f" ({len(faults) - 1} more such files)" if len(faults) > 1 else ""
        raise ValueError(
            f"{folder} holds {name}, which {fault}{more}; push a folder that hub_upload/build.py has written"
        )
    return files


def _fault(name: PurePosixPath, file: Path) -> str | None:
    """Why a file must not be published; None if it may be."""
    if any(fnmatch(part, pattern) for part in name.parts for pattern in OF_A_RUN):
        return "belongs to a training, not to a model"
    if any(fnmatch(name.name, pattern) for pattern in PICKLES):
        return "is a pickle, and a pickle can execute any code when it is loaded"
    is_hidden = any(part.startswith(".") for part in name.parts)
    if name.name not in NAMES and (is_hidden or not any(fnmatch(name.name, pattern) for pattern in PARTS)):
        return "is not a part of a model"
    if name.suffix not in LARGE and TOKEN.search(file.read_bytes()):
        return "has a token of the Hub in it"
    return None


def plan_push(folder: Path, repo_id: str, is_needed: bool = True) -> PullRequest:
    """Check a folder, and compare it with the repository.

    Args:
        folder: A folder that `build` has written.
        repo_id: Its repository on the Hub.
        is_needed: Whether it is an error that the repository cannot be read.

    Raises:
        ValueError: The folder is refused by `model_files` or by `verify`.
        OSError: The folder or the repository cannot be read.
    """
    check_id(repo_id)
    files = model_files(folder)
    report = verify(str(folder))
    if not report["ok"]:
        raise ValueError(f"{folder} does not pass hub_upload/verify.py: {report['error']}")
    try:
        repository = read_repository(repo_id)
    except OSError as error:
        if is_needed:
            raise
        repository = Repository(repo_id, fault=str(error))
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
    return PullRequest(repository, compare(files, repository), f"Upload {folder.resolve().name}", text)


def run(arguments: argparse.Namespace) -> None:
    """Print the pull request, and send it if this is asked for."""
    hub_logging.set_verbosity_error()  # it would tell of each repeated request
    with tempfile.TemporaryDirectory() as workspace:
        if arguments.drop_in:
            request = plan_drop_in(
                arguments.drop_in,
                Path(workspace),
                arguments.revision,
                arguments.measured,
                arguments.try_old_code,
            )
        else:
            request = plan_push(Path(arguments.folder), arguments.repo_id, is_needed=arguments.push)
        print(request)
        print()
        if not request.operations and request.repository.commit:
            print(f"{request.repository.repo_id} already has these files; no pull request is needed")
        elif not arguments.push:
            print("This was a dry run, and nothing was sent; --push opens this pull request")
        else:
            print(f"opened {open_pull_request(request, arguments.create)}")


def main(measured: str | None = None) -> None:
    """Plan the pull request, print it, and send it with --push.

    Args:
        measured: Default of `--measured`.
    """
    usage = "%(prog)s FOLDER org/name [--push]\n       %(prog)s --drop-in org/name [--push]"
    parser = CommandParser([], prog="push.py", usage=usage, description=__doc__)
    add = parser.add_argument
    add("folder", nargs="?", help="Folder that hub_upload/build.py has written.")
    add("repo_id", nargs="?", help="Repository on the Hub, such as org/name.")
    add("--drop-in", metavar="org/name", help="Replace the code of this repository; its weights stay.")
    add("--revision", help="With --drop-in: branch or commit to start from. Default: main.")
    add(
        "--measured",
        default=measured,
        metavar="FILE",
        help="With --drop-in: table of errors in Markdown, for the text.",
    )
    add("--try-old-code", action="store_true", help="With --drop-in: let code of the repository run, too.")
    add("--push", action="store_true", help="Open the pull request. Without it nothing is sent.")
    add("--create", choices=("private", "public"), help="With --push: create the repository if it does not exist.")
    arguments = parser.parse_args()
    if bool(arguments.drop_in) == bool(arguments.repo_id) or bool(arguments.drop_in) == bool(arguments.folder):
        parser.error("give FOLDER and org/name, or --drop-in org/name alone")
    if arguments.revision and not arguments.drop_in:
        parser.error("--revision belongs to --drop-in; a folder is pushed to main")
    if arguments.create and not arguments.push:
        parser.error("--create belongs to --push")
    run_command(parser.prog, run, arguments)


if __name__ == "__main__":
    main()
