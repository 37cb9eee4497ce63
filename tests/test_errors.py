"""Every error a person can act on becomes one sentence; others are left alone."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridize import errors


def foreign(package: str, name: str, *bases: type[BaseException]) -> BaseException:
    return type(name, bases or (Exception,), {"__module__": f"{package}.errors"})("details that nobody reads")


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (errors.SourceError("No such model; try another."), "No such model; try another."),
        (foreign("torch", "OutOfMemoryError", RuntimeError), "ran out of memory"),
        (foreign("huggingface_hub", "GatedRepoError"), "gated"),
        (foreign("huggingface_hub", "RepositoryNotFoundError"), "no such repository"),
        (foreign("huggingface_hub", "LocalEntryNotFoundError", FileNotFoundError), "cannot be reached"),
        (foreign("safetensors", "SafetensorError"), "damaged"),
        (foreign("httpx", "ConnectError"), "network"),
        (foreign("requests", "ConnectionError", OSError), "network"),
        (MemoryError(), "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "not enough memory"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "The disk is full at /x/y"),
        (OSError(errno.EACCES, "Permission denied", "/x/y"), "Permission denied at /x/y"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/x/y"), "No such file or directory at /x/y"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_explained(error: BaseException, part: str) -> None:
    sentence = errors.explain(error)
    assert sentence is not None and part in sentence and "\n" not in sentence and sentence.endswith(".")


def test_the_real_out_of_memory_error_is_known() -> None:
    import torch

    assert "--device cpu" in (errors.explain(torch.cuda.OutOfMemoryError("CUDA out of memory")) or "")


def test_the_real_hub_errors_are_known() -> None:
    from huggingface_hub import errors as hub

    for name in errors._FOREIGN:
        package, _, kind = name.partition(".")
        if package == "huggingface_hub":
            assert isinstance(getattr(hub, kind), type), f"huggingface_hub has no {kind}"


@pytest.mark.parametrize(("status", "part"), [(401, "token"), (429, "limiting"), (503, "status 503")])
def test_hub_status(status: int, part: str) -> None:
    error = foreign("huggingface_hub", "HfHubHTTPError")
    error.response = type("Response", (), {"status_code": status})()  # type: ignore[attr-defined]
    assert part in (errors.explain(error) or "")


def test_the_real_safetensors_errors_are_told_apart(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    whole, cut = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    save_file({"a": torch.zeros(10)}, whole)
    cut.write_bytes(whole.read_bytes()[:-7])

    def told(work: Callable[[], object]) -> str:
        with pytest.raises(Exception) as caught:
            work()
        return errors.explain(caught.value) or "nothing"

    assert "damaged" in told(lambda: load_file(cut))
    assert "check the path" in told(lambda: load_file(tmp_path / "none.safetensors"))
    for name in ("file", "lost/file"):
        sentence = told(lambda name=name: save_file({"a": torch.zeros(10)}, whole / name))
        assert "damaged" not in sentence and sentence != "nothing", sentence
    full = foreign("safetensors", "SafetensorError")
    full.args = ("Error while serializing: I/O error: No space left on device (os error 28)",)
    assert "The disk is full" in (errors.explain(full) or "")


def test_a_cause_is_found_behind_what_wraps_it() -> None:
    try:
        try:
            raise foreign("huggingface_hub", "GatedRepoError")
        except Exception as error:
            raise OSError("You are trying to access a gated repo.") from error
    except OSError as wrapped:
        assert "gated" in (errors.explain(wrapped) or "")


def test_our_own_bugs_are_not_explained_away() -> None:
    assert errors.explain(ValueError("x")) is None
    assert errors.explain(KeyError("x")) is None
    assert errors.explain(OSError("no number")) is None


def test_exit_codes() -> None:
    assert errors.PlanError("x").exit_code == 1
    assert errors.UsageError("x").exit_code == 2
    assert errors.Interrupted("x").exit_code == 130
    assert isinstance(errors.PlanError("x"), ValueError)
