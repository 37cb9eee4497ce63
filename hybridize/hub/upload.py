"""Sends a verified folder to the Hub in one commit, so that a repository never holds half a model.

Large files go first, one after another, and become part of the repository with the commit only; a push that broke off
and is run again sends those that have not arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridize.console import Console, size
from hybridize.errors import HubError, UsageError
from hybridize.hub.contents import CARD, Contents
from hybridize.hub.refusals import LOG_IN, explained
from hybridize.weights import INDEX

MAIN = "main"


@dataclass(frozen=True)
class Target:
    """Where to push: a repository, a branch or None for main, and whether as a pull request."""

    repository: str
    private: bool = False
    revision: str | None = None
    create_pr: bool = False
    message: str = ""


class Hub:
    """The Hub, as its holder of the token sees it."""

    def __init__(self) -> None:
        from huggingface_hub import HfApi

        self.api: Any = HfApi()

    def user(self) -> str:
        """The token's user; HubError where there is no token, it is refused, or it may only read."""
        with explained("the Hub"):
            found: dict[str, Any] = self.api.whoami()
        role = ((found.get("auth") or {}).get("accessToken") or {}).get("role")
        if role == "read":
            raise HubError(f"The access token of {found['name']} may only read; {LOG_IN}.")
        return str(found["name"])

    def prepare(self, target: Target) -> Any:
        """Make the repository and the branch if need be; returns the files and the commit that are there."""
        from huggingface_hub.errors import RepositoryNotFoundError

        name = target.repository
        with explained(name):
            try:
                before = self.api.model_info(name)
            except RepositoryNotFoundError:
                before = None
        if before is None:
            if target.create_pr:
                raise HubError(f"The Hub has no {name} to open a pull request on; leave --create-pr out to make it.")
            with explained(name):
                self.api.create_repo(name, private=target.private or None, exist_ok=True)
        elif target.private and not before.private:
            raise HubError(f"{name} exists and is public; make it private in its settings, or leave --private out.")
        with explained(name):
            if target.revision not in (None, MAIN) and not str(target.revision).startswith("refs/"):
                self.api.create_branch(name, branch=target.revision, exist_ok=True)
            return self.api.model_info(name, revision=target.revision)

    def push(self, folder: Path, contents: Contents, target: Target, console: Console) -> dict[str, Any]:
        """Upload the files and commit them; returns the commit's id and addresses."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, ModelCard

        there = self.prepare(target)
        with explained(target.repository):  # the commit, which comes last, would check it as well
            ModelCard((folder / CARD).read_text("utf-8")).validate("model")
        additions = [CommitOperationAdd(name, str(folder / name)) for name in contents.files]
        stale = sorted(_stale({file.rfilename for file in there.siblings or []}, set(contents.files)))
        where = {"revision": target.revision, "create_pr": target.create_pr}
        large = [addition for addition in additions if addition.path_in_repo.endswith(".safetensors")]
        for number, addition in enumerate(large, 1):
            name = addition.path_in_repo
            console.note(f"Uploading {name} ({size(contents.files[name])}), {number} of {len(large)}.")
            with explained(target.repository):
                self.api.preupload_lfs_files(target.repository, [addition], **where)
        operations = [*additions, *(CommitOperationDelete(name) for name in stale)]
        with explained(target.repository):
            commit = self.api.create_commit(
                target.repository,
                operations,
                commit_message=target.message,
                parent_commit=there.sha,
                **where,
            )
        return {
            "commit": commit.oid,
            "unchanged": commit.oid == there.sha,
            "url": f"{self.api.endpoint}/{target.repository}",
            "pull_request": commit.pr_url,
            "removed": stale,
        }


def check_target(target: Target) -> None:
    """UsageError for a name that the Hub does not allow, and for what cannot be asked for together."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        if target.repository:
            validate_repo_id(target.repository)
    except HFValidationError as error:
        raise UsageError(f"{target.repository!r} is no name for a repository; give OWNER/NAME. {error}") from None
    if target.create_pr and target.revision not in (None, MAIN):
        raise UsageError("A pull request is opened on main; leave --create-pr or --revision out.")


def _stale(there: set[str], ours: set[str]) -> set[str]:
    """Weights in the repository that would be mistaken for a part of the new ones."""
    weights = {name for name in there if "/" not in name and (name.endswith(".safetensors") or name == INDEX)}
    return weights - ours
