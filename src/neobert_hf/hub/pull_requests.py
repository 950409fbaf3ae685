"""A pull request on the Hub: what it would send, for a person to read, and how it is opened."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id

from ..files.writing import file_hash
from ..runs.commands import one_line

# What the Hub means by a status, and what to do.
ANSWERS = {
    401: "the Hub asks for a token that it accepts, or has no such repository; `hf auth login` saves a token",
    403: "your token may not do this; make one with write access to this repository, and save it by `hf auth login`",
    404: "the Hub has no such repository, or your token may not see it; with FOLDER, --create private creates it",
}


@dataclass(frozen=True)
class PullRequest:
    """A pull request before it is opened.

    Attributes:
        repo_id: Its repository.
        title: First line of the commit.
        text: The rest, in Markdown.
        files: Files by name in the repository. Those that the repository has already are not sent again.
        deleted: Names of files to delete.
        parent_commit: Commit that the files were made for; the Hub refuses the pull request if there is a newer one.
    """

    repo_id: str
    title: str
    text: str
    files: Mapping[str, Path]
    deleted: Sequence[str] = ()
    parent_commit: str | None = None

    def __str__(self) -> str:
        """The files with their size and SHA-256, and the text."""
        width = max(map(len, (*self.files, *self.deleted)))
        lines = [
            f"  {name:<{width}}  {file.stat().st_size:>13,} bytes  {file_hash(file)}"
            for name, file in sorted(self.files.items())
        ]
        lines += [f"  {name:<{width}}  deleted" for name in self.deleted]
        return "\n".join([f"{self.repo_id}:", *lines, "", f"Pull request: {self.title}", "", self.text.strip()])


def check_id(repo_id: str) -> None:
    """Raise ValueError if `repo_id` is not an id of the Hub with an owner, org/name."""
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"{repo_id} has no owner; give the id of a repository, such as org/{repo_id}")


@contextmanager
def explained(repo_id: str, outcome: str = "nothing was sent") -> Iterator[None]:
    """Convert the errors of huggingface_hub and of its HTTP library into an OSError of one line.

    Args:
        repo_id: The repository, for the message.
        outcome: End of the message: what has happened to the repository.

    Raises:
        OSError: The Hub refused a request or could not be reached. Errors of local files pass unchanged.
    """
    try:
        yield
    # The first base of HfHubHTTPError is the base of all errors of the HTTP library, which differs between versions.
    except (OSError, RuntimeError, *HfHubHTTPError.__bases__) as error:
        if getattr(error, "filename", None):
            raise
        chain = (error, error.__cause__)  # an upload raises a RuntimeError from the answer of the Hub
        answers = [link.response for link in chain if isinstance(link, HfHubHTTPError)]
        status = next((answer.status_code for answer in answers if answer is not None), None)
        reason = ANSWERS.get(status, one_line(error.__cause__ or error))
        if status is None:
            reason = f"the Hub at {HfApi().endpoint} cannot be reached ({reason})"
        raise OSError(f"{repo_id}: {reason}; {outcome}") from error


def open_pull_request(request: PullRequest, create: str | None = None) -> str | None:
    """Open a pull request with one commit; it has all of the files, or does not exist.

    Args:
        request: The pull request.
        create: Create the repository first, "private" or "public", if it does not exist.

    Returns:
        Its address; None if the repository has these files already, so that there is nothing to send.

    Raises:
        ValueError: The Hub refuses the metadata of the card.
        OSError: The Hub cannot be reached, or refuses the commit.
    """
    api = HfApi()
    with explained(
        request.repo_id, f"{api.endpoint}/{request.repo_id}/discussions lists the pull request if it was opened"
    ):
        if create:
            api.create_repo(request.repo_id, private=create == "private", exist_ok=True)
        return api.create_commit(
            request.repo_id,
            [
                *(CommitOperationAdd(name, file) for name, file in request.files.items()),
                *(CommitOperationDelete(name) for name in request.deleted),
            ],
            commit_message=request.title,
            commit_description=request.text,
            create_pr=True,
            parent_commit=request.parent_commit,
        ).pr_url
