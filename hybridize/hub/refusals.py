"""Turns what the Hub or the network refuses during a push into one sentence with a next step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybridize.errors import HubError, HybridizeError, explain

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"
AGAIN = "run the same command again: what has arrived is not sent twice"


@contextmanager
def explained(repository: str) -> Iterator[None]:
    """HubError in place of what huggingface_hub and the network raise; other errors pass."""
    try:
        yield
    except (HybridizeError, KeyboardInterrupt):
        raise
    except Exception as error:
        sentence = _sentence(repository, error)
        if sentence is None:
            raise
        raise HubError(sentence) from error


def _sentence(repository: str, error: BaseException) -> str | None:
    link: BaseException | None = error
    while link is not None:  # huggingface_hub wraps what went wrong with one file in a RuntimeError
        if type(link).__name__ == "LocalTokenNotFoundError":
            return f"No access token was found, and a push needs one: {LOG_IN}."
        if type(link).__name__ == "OfflineModeIsEnabled":
            return f"HF_HUB_OFFLINE is set, so that nothing can be pushed to {repository}; unset it."
        response = getattr(link, "response", None)
        if response is not None:
            return _of_status(repository, response, link)
        if type(link).__module__.partition(".")[0].startswith(("http", "requests", "urllib3")):
            return f"The connection to the Hub broke off ({type(link).__name__}); {AGAIN}."
        if isinstance(link, ConnectionError | TimeoutError):
            return f"The connection to the Hub broke off ({type(link).__name__}); {AGAIN}."
        link = link.__cause__ or link.__context__
    text = " ".join(str(error).split())[:300]
    if isinstance(error, ValueError) and ("LFS batch" in text or "metadata" in text.lower()):
        return f"The Hub does not take what was to be pushed to {repository}: {text}"
    return explain(error)


def _of_status(repository: str, response: Any, error: BaseException) -> str:
    status = int(getattr(response, "status_code", 0))
    said = _said(response, error)
    kind = type(error).__name__
    if kind == "RevisionNotFoundError":
        return f"{repository} has no such revision; name a branch with --revision, or leave it out."
    if status == 401 and kind != "RepositoryNotFoundError":
        return f"The Hub refused the access token (401): {LOG_IN}; HF_TOKEN, where set, is used before the login's."
    if status in (401, 404):
        return (
            f"The Hub has no repository {repository} that this token may see ({status}); check its name, that the user "
            "or organisation exists, and that the token may write there."
        )
    if status == 403:
        if "storage" in said.lower() or "quota" in said.lower():
            return f"The Hub's storage limit is reached (403{said}); free some space there, or push to another account."
        return (
            f"This token may not write to {repository} (403{said}); give it write permission at "
            "https://huggingface.co/settings/tokens, choose a repository of your own, or open a pull request with "
            "--create-pr."
        )
    if status in (409, 412):
        return f"{repository} changed while this was being pushed ({status}{said}); look at it, and {AGAIN}."
    if status == 413:
        return f"The Hub says that this is too large (413{said}); ask it for more room, or push to another account."
    if status == 429:
        return f"The Hub is limiting requests (429{said}); wait a few minutes and {AGAIN}."
    if status >= 500:
        return f"The Hub has trouble of its own ({status}); wait a little and {AGAIN}."
    return f"The Hub refused the push to {repository} ({status}{said})."


def _said(response: Any, error: BaseException) -> str:
    """The Hub's own words, behind a colon."""
    words = getattr(error, "server_message", None) or response.headers.get("X-Error-Message") or ""
    words = " ".join(str(words).split())[:200]
    return f": {words}" if words else ""
