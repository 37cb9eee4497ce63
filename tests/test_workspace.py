"""Runs are found again, and nothing appears under its final name before it is whole."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import hybridize
from hybridize.errors import WorkspaceError, explain
from hybridize.workspace import (
    INDEX,
    VARIABLE,
    Workspace,
    atomic_folder,
    check_disk_space,
    locked,
    write_json,
    write_text,
)


def test_last(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "runs")
    assert workspace.last() is None
    made = tmp_path / "made"
    made.mkdir()
    workspace.record("source", "owner/name", revision="abc")
    workspace.record("hybrid", made, ratio=0.5)
    again = Workspace(tmp_path / "runs")
    assert again.last("source")["value"] == "owner/name"  # type: ignore[index]
    last = again.last()
    assert last is not None and (last["kind"], last["value"], last["ratio"]) == ("hybrid", str(made), 0.5)
    workspace.record("source", "other/name", revision="def")
    assert again.last("source", revision="abc")["value"] == "owner/name"  # type: ignore[index]
    assert again.last("source", "hybrid", revision="no") is None
    made.rmdir()
    assert again.last()["kind"] == "source"  # type: ignore[index]
    assert again.last("hybrid") is None


def test_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYBRIDIZE_WORKSPACE", raising=False)
    assert Workspace().folder == Path("hybridize-runs")
    monkeypatch.setenv("HYBRIDIZE_WORKSPACE", "elsewhere")
    assert Workspace().folder == Path("elsewhere")
    assert Workspace("given").folder == Path("given")
    assert not list(tmp_path.iterdir()), "looking must not create anything"
    Path("file").touch()
    with pytest.raises(WorkspaceError, match="is a file"):
        Workspace("file")


def test_run_folder(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    assert workspace.run_folder("Qwen/Qwen3-8B gka 50%") == tmp_path / "Qwen-Qwen3-8B-gka-50"
    (tmp_path / "a").mkdir()
    (tmp_path / "a-2").mkdir()
    assert workspace.run_folder("a") == tmp_path / "a-3"
    assert workspace.run_folder("../..") == tmp_path / "run"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{broken", "not valid JSON"),
        ("[1, 2]", "not an index"),
        ('{"entries": {}}', "not an index"),
        ('{"format": 9, "entries": []}', "has format 9"),
        ('{"format": 1, "entries": [{"kind": "x"}]}', "without a kind and a value"),
        ("\udcff", "not valid JSON"),
    ],
)
def test_a_foreign_index_is_refused_and_kept(tmp_path: Path, content: str, part: str) -> None:
    path = tmp_path / INDEX
    path.write_text(content, "utf-8", errors="surrogateescape")
    before = path.read_bytes()
    for action in (Workspace(tmp_path).last, lambda: Workspace(tmp_path).record("x", "y")):
        with pytest.raises(WorkspaceError, match=part) as caught:
            action()
        assert str(path) in str(caught.value)
    assert path.read_bytes() == before


def test_write_keeps_the_old_file_on_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a" / "x.json"
    write_json(path, {"a": 1})
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert json.loads(path.read_text()) == {"a": 1}
    assert [item.name for item in path.parent.iterdir()] == ["x.json"]


def test_written_files_have_the_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_text(tmp_path / "x", "text")
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_atomic_folder(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "out"
    with atomic_folder(final) as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "x").write_text("whole")
        assert not final.exists() and partial.parent == final.parent and partial.name.startswith(".")
    assert (final / "sub" / "x").read_text() == "whole"
    assert [item.name for item in final.parent.iterdir()] == ["out"]
    (tmp_path / "plain").mkdir()
    assert final.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, SystemExit])
def test_atomic_folder_removes_a_part(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), atomic_folder(tmp_path / "out") as partial:
        (partial / "x").write_text("part")
        raise error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["folder", "file", "broken link"])
def test_atomic_folder_refuses_what_exists(tmp_path: Path, kind: str) -> None:
    final = tmp_path / "out"
    if kind == "folder":
        final.mkdir()
    elif kind == "file":
        final.write_text("precious")
    else:
        final.symlink_to(tmp_path / "nowhere")
    with pytest.raises(WorkspaceError, match="exists already"), atomic_folder(final):
        pytest.fail("the block must not run")
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


def test_atomic_folder_refuses_what_appeared_meanwhile(tmp_path: Path) -> None:
    final = tmp_path / "out"
    with pytest.raises(WorkspaceError, match="exists already"), atomic_folder(final) as partial:
        (partial / "x").write_text("new")
        final.mkdir()
        (final / "x").write_text("precious")
    assert (final / "x").read_text() == "precious"
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


def test_kill_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    """kill -9 in the middle of writing; the next writer clears the part away, and a living writer's part stays."""
    code = (
        "import sys, time\n"
        "from hybridize.workspace import atomic_folder\n"
        "with atomic_folder(sys.argv[1]) as partial:\n"
        "    (partial / 'x').write_text('part')\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
    )
    final = tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": str(Path(hybridize.__file__).parent.parent)}
    command = [sys.executable, "-c", code, str(final)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
        with pytest.raises(RuntimeError), atomic_folder(final):
            raise RuntimeError
        assert len(list(tmp_path.iterdir())) == 1, "the part of a living process was removed"
        writer.send_signal(signal.SIGKILL)
    assert not final.exists() and len(list(tmp_path.iterdir())) == 1
    for _ in range(50):  # until the system has forgotten the process
        with atomic_folder(final) as partial:
            (partial / "x").write_text("whole")
        if len(list(tmp_path.iterdir())) == 1:
            break
        (final / "x").unlink()
        final.rmdir()
        time.sleep(0.1)
    assert [item.name for item in tmp_path.iterdir()] == ["out"]
    assert (final / "x").read_text() == "whole"


def test_a_run_is_worked_on_by_one_process_until_it_ends_or_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="the system has no such locks")
    code = (
        "import sys, time, pathlib\n"
        "from hybridize.workspace import locked\n"
        "with locked(pathlib.Path(sys.argv[1]), wait=False):\n"
        "    print('working', flush=True)\n"
        "    time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(hybridize.__file__).parent.parent)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "working\n"
        refused = pytest.raises(WorkspaceError, match="Another process works on")
        with refused, locked(tmp_path, wait=False):
            pass
        worker.send_signal(signal.SIGKILL)
    for _ in range(2):
        with locked(tmp_path, wait=False):
            pass
    assert list(tmp_path.iterdir()) == []


def test_disk_space(tmp_path: Path) -> None:
    check_disk_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(WorkspaceError, match=r"needs 1024\.0 TiB, but the disk has .* free"):
        check_disk_space(tmp_path / "not" / "yet", 2**50)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as raised:
        write_text(tmp_path / "probe.json", "{}")
    assert f"disk is full at {tmp_path / 'probe.json'}" in str(explain(raised.value))
    assert list(tmp_path.iterdir()) == []


def test_processes_that_record_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    """Threads stand for them: each opens the folder for itself, and that is what holds a lock."""

    def work(number: int) -> Path:
        own = Workspace(tmp_path / "runs")
        folder = own.make_run_folder("a")
        for turn in range(5):
            own.record("probe", f"{number}-{turn}")
        return folder

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(work, range(8)))
    assert len(set(folders)) == 8 and all(folder.is_dir() for folder in folders)
    found = sorted(entry["value"] for entry in Workspace(tmp_path / "runs").entries())
    assert found == sorted(f"{number}-{turn}" for number in range(8) for turn in range(5))


def test_a_lock_is_refused_or_waited_for(tmp_path: Path) -> None:
    refused = pytest.raises(WorkspaceError, match="Another process works on")
    with locked(tmp_path, wait=False), refused, locked(tmp_path, wait=False):
        pass
    with locked(tmp_path, wait=True):
        pass


def test_the_option_that_finds_a_workspace_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Workspace().option == Workspace("hybridize-runs").option == ""
    assert Workspace("my runs").option == " --workspace 'my runs'"
    monkeypatch.setenv(VARIABLE, "other")
    assert Workspace().option == "" and Workspace("hybridize-runs").option == " --workspace hybridize-runs"
