"""A repository on the Hub: what its files are, what a change would do to them, and the pull request that makes the change."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import validate_repo_id
from huggingface_hub.utils.sha import git_hash

from ..data.files import file_hash
from ..runs.commands import one_line

# What the Hub means by a status, and what to do.
ANSWERS = {
    401: "the Hub asks for a token that it accepts, or has no such repository; `hf auth login` saves a token",
    403: "your token may not do this; make one with write access to this repository, and save it by `hf auth login`",
    404: "the Hub has no such repository or revision, or your token may not see it",
}


# What becomes of a file; the last is said of all files if the repository was not read.
STATES = ("new", "changed", "deleted", "unchanged", "left alone", "not compared")


@dataclass(frozen=True)
class Repository:
    """What a repository holds at one commit.

    Attributes:
        repo_id: Its id.
        commit: Hash of the commit; None if there is no such repository, or it was not read.
        files: Its files by name, with size and hash.
        fault: Why it was not read.
    """

    repo_id: str
    commit: str | None = None
    files: Mapping[str, RepoSibling] = field(default_factory=dict)
    fault: str | None = None


@dataclass(frozen=True)
class Change:
    """What becomes of one file; `state` is one of `STATES`, and `source` is the file to send."""

    name: str
    state: str
    size: int | None
    sha256: str = ""
    source: Path | None = None


@dataclass(frozen=True)
class PullRequest:
    """A pull request before it is sent.

    Attributes:
        repository: Its target, as it was read.
        changes: One for each file.
        title: First line of the commit.
        text: The rest, in Markdown.
    """

    repository: Repository
    changes: list[Change]
    title: str
    text: str

    @property
    def operations(self) -> list[CommitOperationAdd | CommitOperationDelete]:
        """The operations of the commit; unchanged files are not sent."""
        added = [change for change in self.changes if change.state in ("new", "changed")]
        deleted = [change for change in self.changes if change.state == "deleted"]
        return [
            *(CommitOperationAdd(change.name, change.source) for change in added),
            *(CommitOperationDelete(change.name) for change in deleted),
        ]

    def __str__(self) -> str:
        """What would be sent, for a person to read."""
        counts = Counter(change.state for change in self.changes)
        commit = self.repository.commit
        lines = [
            f"{self.repository.repo_id}{f' at {commit[:12]}' if commit else ''}: "
            + ", ".join(f"{count} {state}" for state, count in counts.items())
        ]
        if fault := self.repository.fault:
            lines.append(f"not compared with the repository: {fault}")
        width = max((len(change.name) for change in self.changes), default=0)
        for change in self.changes:
            size = f"{change.size:,} bytes" if change.size is not None else ""
            lines.append(f"  {change.state:<12}  {change.name:<{width}}  {size:>19}  {change.sha256}".rstrip())
        return "\n".join([*lines, "", f"Pull request: {self.title}", "", self.text.strip()])


def check_id(repo_id: str) -> None:
    """Raise ValueError if `repo_id` is not an id of the Hub with an owner, org/name."""
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"{repo_id} has no owner; give the id of a repository, such as org/{repo_id}")


@contextmanager
def explained(repo_id: str, outcome: str = "nothing was sent", doubt: str | None = None) -> Iterator[None]:
    """Convert the errors of huggingface_hub and of its HTTP library into an OSError of one line.

    Args:
        repo_id: The repository, for the message.
        outcome: End of the message: what has happened to the repository.
        doubt: The same if the Hub has not said that it refuses: the answer was lost, or its status is 500 or more.

    Raises:
        OSError: The Hub refused a request or could not be reached. Errors of local files pass unchanged.
    """
    try:
        yield
    # The first base of HfHubHTTPError is the base of all errors of the HTTP library, which differs between versions.
    except (OSError, RuntimeError, *HfHubHTTPError.__bases__) as error:
        if getattr(error, "filename", None):
            raise
        chain = [error, error.__cause__]  # an upload raises a RuntimeError from the answer of the Hub
        answers = [getattr(link, "response", None) for link in chain if isinstance(link, HfHubHTTPError)]
        status = next((answer.status_code for answer in answers if answer is not None), None)
        reason = ANSWERS.get(status, f"the Hub answered with status {status}; try again later")
        if status is None:
            reason = f"the Hub at {HfApi().endpoint} cannot be reached ({one_line(error.__cause__ or error)})"
        is_refused = status is not None and status < 500
        raise OSError(f"{repo_id}: {reason}; {outcome if is_refused else doubt or outcome}") from error


def read_repository(repo_id: str, revision: str | None = None) -> Repository:
    """Read the names, sizes and hashes of the files of a repository; one that does not exist has no commit.

    Raises:
        OSError: The Hub cannot be reached, refuses the token, or has no such revision.
    """
    with explained(repo_id):
        try:
            info = HfApi().model_info(repo_id, revision=revision, files_metadata=True)
        except GatedRepoError:
            raise
        except RepositoryNotFoundError as error:
            if error.response.status_code != 404:
                raise
            return Repository(repo_id, fault=ANSWERS[404])
    return Repository(repo_id, info.sha, {sibling.rfilename: sibling for sibling in info.siblings})


def compare(files: Mapping[str, Path], repository: Repository, deleted: Iterable[str] = ()) -> list[Change]:
    """Compare files with those of the repository, by their hashes.

    Args:
        files: Paths by name in the repository.
        repository: The repository.
        deleted: Names of its files to delete.
    """
    changes = []
    for name, file in files.items():
        there, sha256 = repository.files.get(name), file_hash(file)
        if there is None:
            state = "new" if repository.commit or repository.fault == ANSWERS[404] else "not compared"
        elif there.lfs:
            state = "unchanged" if there.lfs.sha256 == sha256 else "changed"
        else:
            state = "unchanged" if there.blob_id == git_hash(file.read_bytes()) else "changed"
        changes.append(Change(name, state, file.stat().st_size, sha256, file))
    for name in repository.files.keys() - files.keys():
        there = repository.files[name]
        state = "deleted" if name in deleted else "left alone"
        changes.append(Change(name, state, there.size, there.lfs.sha256 if there.lfs else ""))
    return sorted(changes, key=lambda change: (STATES.index(change.state), change.name))


def open_pull_request(request: PullRequest, create: str | None = None) -> str:
    """Send a pull request as one commit, from the commit that was read; return its address.

    Args:
        request: The pull request.
        create: Create the repository first, "private" or "public", if it does not exist.

    Raises:
        ValueError: The repository does not exist, and `create` is None.
        OSError: It was not read, or the Hub cannot be reached or refuses the commit. A commit is made whole or not at all.
    """
    repository, api = request.repository, HfApi()
    repo_id, outcome = repository.repo_id, "no pull request was opened"
    if repository.commit is None:
        if repository.fault != ANSWERS[404]:
            raise OSError(repository.fault)
        if create is None:
            raise ValueError(f"{repo_id}: {ANSWERS[404]}; add --create private, or --create public, to create it")
        with explained(repo_id, "it was not created"):
            api.create_repo(repo_id, private=create == "private")
        outcome = "the new repository is still empty"
    doubt = f"see {api.endpoint}/{repo_id}/discussions, whether the pull request was opened"
    with explained(repo_id, outcome, doubt):
        return api.create_commit(
            repo_id,
            request.operations,
            commit_message=request.title,
            commit_description=request.text,
            create_pr=True,
            parent_commit=repository.commit,
        ).pr_url
