"""Errors a person can act on: each message says what was found, where, and what to do."""

import errno
import os
import re
from collections.abc import Iterator

DEBUG_VARIABLE = "HYBRIDIZE_DEBUG"


class HybridizeError(Exception):
    """The work failed for a known reason; the message is one sentence with a next step."""

    exit_code = 1


class UsageError(HybridizeError):
    """The command line or an argument was wrong."""

    exit_code = 2


class Interrupted(HybridizeError):
    """The person pressed Ctrl-C; the message says what was kept and how to go on."""

    exit_code = 130


class PlanError(HybridizeError, ValueError):
    """A layer plan is malformed or does not fit the model."""


class SourceError(HybridizeError):
    """A source model is missing, damaged, or of a kind that cannot be converted."""


class ConversionError(HybridizeError):
    """A source model could not be turned into the hybrid that the plan asks for."""


class CheckpointError(HybridizeError):
    """A checkpoint of a run or of a hybrid is missing, damaged, or does not belong to what is being done."""


class DataError(HybridizeError):
    """Text to train or to measure on is missing, unreadable, or too short."""


class NonFiniteError(HybridizeError):
    """A model's weights, activations or losses are not finite numbers."""


class WorkspaceError(HybridizeError):
    """The workspace or an output folder cannot be read or written."""


class HubError(HybridizeError):
    """The Hub refused a push, or could not be reached."""


# Exceptions of other libraries, most specific first, as "package.Class". They are recognised by name, so that a library
# is never imported only to explain an error.
_FOREIGN = {
    "torch.OutOfMemoryError": "The accelerator ran out of memory; use a smaller batch or context, or --device cpu.",
    "huggingface_hub.GatedRepoError": "The Hub says that this repository is gated; ask for access on its page, then "
    "run `hf auth login`.",
    "huggingface_hub.RevisionNotFoundError": "The Hub has this repository, but not this revision; check --revision.",
    "huggingface_hub.RepositoryNotFoundError": "The Hub has no such repository, or it is private; check the name, or "
    "run `hf auth login`.",
    "huggingface_hub.OfflineModeIsEnabled": "HF_HUB_OFFLINE is set and the files are not in the local cache; unset it, "
    "or give a local folder.",
    "huggingface_hub.LocalEntryNotFoundError": "The Hub cannot be reached (or HF_HUB_OFFLINE is set) and the files are "
    "not in the local cache; check the connection, or give a local folder.",
    "huggingface_hub.EntryNotFoundError": "The repository on the Hub lacks a file that is needed; check that it holds "
    "a transformers model.",
}
_CONNECTION = {"ConnectError", "ConnectTimeout", "ReadTimeout", "ConnectionError", "Timeout"}
_STATUS = {
    401: "The Hub refused the access token (401); run `hf auth login`.",
    403: "The Hub says that this token may not do that (403); check its permissions on the Hub.",
    429: "The Hub is limiting requests (429); wait a few minutes and run the command again.",
}


def explain(error: BaseException) -> str | None:
    """One sentence for an error that a person can act on, or None for one that is ours to fix."""
    if isinstance(error, HybridizeError):
        return str(error)
    for link in _chain(error):
        sentence = _explain_foreign(link)
        if sentence is not None:
            return sentence
    for link in _chain(error):
        if isinstance(link, OSError) and link.errno is not None:
            return _explain_os(link)
        if isinstance(link, FileNotFoundError):  # without a number, from libraries that are not written in Python
            return f"{link}; check the path."
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what caused it, outermost first: transformers wraps what huggingface_hub raises."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _explain_safetensors(text: str) -> str:
    """safetensors has one error for damaged files and for what the system refuses, which it gives by number."""
    number = re.search(r"os error (\d+)", text)
    told = None if number is None else _explain_os(OSError(int(number[1]), os.strerror(int(number[1])), None))
    if told is not None:
        return told
    if number is not None or "serializ" in text.lower().replace("deserializ", ""):
        return f"A safetensors file could not be written or read ({text}); check the disk and try again."
    return "A safetensors file is damaged or cut short; download or copy it again."


def _explain_foreign(error: BaseException) -> str | None:
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    if "safetensors.SafetensorError" in names:
        return _explain_safetensors(str(error))
    for name, sentence in _FOREIGN.items():
        if name in names:
            return sentence
    if "huggingface_hub.HfHubHTTPError" in names:
        status = int(getattr(getattr(error, "response", None), "status_code", 0))
        return _STATUS.get(status, f"The Hub answered with an error (status {status}); try again later.")
    package, _, kind = f"{type(error).__module__.partition('.')[0]}.{type(error).__name__}".rpartition(".")
    if package.startswith(("http", "requests", "urllib3")) and kind in _CONNECTION:
        return "The network cannot be reached; check the connection, or give a local folder and set HF_HUB_OFFLINE=1."
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
        return "There is not enough memory for this; use a smaller model, batch or context."
    return None


def _explain_os(error: OSError) -> str | None:
    where = f" at {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk is full{where}; free some space, or choose another place with --output or --workspace."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"Permission denied{where}; check who owns it, or choose another place with --output or --workspace."
    if error.filename:
        return f"{error.strerror}{where}; check the path."
    return None
