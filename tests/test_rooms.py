"""Which room may import which, and other rules that a machine can check (the map is in README.md)."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
# Each room and the rooms it may import; every room may import itself.
BASE = {"errors", "devices", "weights", "processes"}
ALLOWED: dict[str, set[str]] = {
    "kernels": set(),
    "mixers": {"kernels", "errors"},
    "hybrid": {"mixers", "kernels", "sources", *BASE},
    "tasks": {"hybrid", "mixers", "kernels", "builtin", "console", "plots", *BASE},
    "hub": {"tasks", "hybrid", "mixers", "kernels", "sources", "builtin", "console", "workspace", "checksums", *BASE},
    "priming": {
        *("tasks", "hybrid", "mixers", "kernels", "sources", "builtin", "console", "plots", "workspace", "checksums"),
        *BASE,
    },
    "probing": {
        *("priming", "tasks", "hybrid", "mixers", "kernels", "sources", "builtin", "console", "plots", "workspace"),
        *BASE,
    },
    "composition": {"tasks", "hybrid", "mixers", "kernels", "sources", "builtin", "console", "workspace", *BASE},
    "benching": {
        *("composition", "tasks", "hybrid", "mixers", "kernels", "sources", "builtin", "console", "plots", "workspace"),
        *BASE,
    },
    "commands": {
        "benching",
        "composition",
        "hub",
        "probing",
        "priming",
        "tasks",
        "hybrid",
        "sources",
        "builtin",
        "console",
        "plots",
        "workspace",
        *BASE,
    },
    "errors": set(),
    "console": {"errors", "processes"},
    "devices": {"errors", "processes"},
    "processes": set(),
    "weights": {"errors"},
    "workspace": {"console", "errors"},
    "plots": {"errors", "workspace"},
    "checksums": {"errors", "workspace"},
    "sources": {"devices", "errors", "weights"},
    "builtin": {"errors", "sources", "workspace"},
    "cli": {"commands", "console", "errors", "processes"},
    "__main__": {"cli"},
    "_hook": {"hybrid"},
}
LIGHT = [
    "__init__",
    "_hook",
    "errors",
    "processes",
    "console",
    "workspace",
    "plots",
    "checksums",
    "devices",
    "weights",
    "sources",
    "builtin",
    "cli",
]


def files() -> list[Path]:
    found = [*(REPOSITORY / "hybridize").rglob("*.py"), *(REPOSITORY / "kernels").rglob("*.py")]
    assert len(found) > 20
    return sorted(found)


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "hybridize" else parts)


def imports(tree: ast.Module, package: str) -> Iterator[tuple[str, int]]:
    """Full names of everything imported, at top level or inside functions, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, base] if base else up)
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def parsed() -> Iterator[tuple[Path, str, ast.Module]]:
    for path in files():
        yield path, module_name(path), ast.parse(path.read_text("utf-8"))


def package_of(path: Path, name: str) -> str:
    parts = ["hybridize", *name.split(".")]
    return ".".join(parts[:-1])


def test_rooms_import_only_what_lies_below() -> None:
    wrong = []
    for path, name, tree in parsed():
        room = name.split(".")[0]
        if room == "__init__":
            continue
        assert room in ALLOWED, f"{path} is in no room that this test knows"
        for target, line in imports(tree, package_of(path, name)):
            parts = target.split(".")
            if parts[0] in ("kernels", "hub", "hybrid", "mixers", "priming", "probing"):
                wrong.append(f"{path}:{line} imports {target}; say hybridize.{target}")
            if parts[0] != "hybridize" or len(parts) == 1:
                continue
            known = parts[1] in ALLOWED
            if known and parts[1] not in {room, *ALLOWED[room]}:
                wrong.append(f"{path}:{line} is in {room} and imports {target}")
            if not known and room == "kernels":
                wrong.append(f"{path}:{line} is a kernel and imports {target}")
    assert not wrong, "\n".join(wrong)


def test_the_map_has_no_cycle() -> None:
    done: set[str] = set()
    waiting = dict(ALLOWED)
    while waiting:
        free = [room for room, below in waiting.items() if below <= done]
        assert free, f"a cycle among {sorted(waiting)}"
        for room in free:
            done.add(room)
            del waiting[room]


def test_light_modules_import_torch_and_transformers_only_when_used() -> None:
    wrong = []
    for path, name, tree in parsed():
        if name not in LIGHT and not name.startswith("commands."):
            continue
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                one = ast.Module([node], [])
                heavy = {"torch", "transformers", "numpy", "huggingface_hub", "safetensors", "gguf", "triton", "rich"}
                heavy |= {"matplotlib"}
                wrong += [f"{path}:{line}" for target, line in imports(one, "") if target.split(".")[0] in heavy]
    assert not wrong, "\n".join(wrong)


def test_no_click_and_no_print() -> None:
    wrong = []
    for path, name, tree in parsed():
        for target, line in imports(tree, package_of(path, name)):
            if target.split(".")[0] == "click" or target.startswith("typer._click"):
                wrong.append(f"{path}:{line} imports {target}; Typer carries its own Click")
        for node in ast.walk(tree):
            called = node.func if isinstance(node, ast.Call) else None
            if name != "console" and isinstance(called, ast.Name) and called.id == "print":
                wrong.append(f"{path}:{node.lineno} prints; only console.py does")  # type: ignore[attr-defined]
    assert not wrong, "\n".join(wrong)


def test_files_stay_short() -> None:
    """A longer file hides two files."""
    tests = [path for path in (REPOSITORY / "tests").rglob("*.py") if "data" not in path.parts]
    long = {str(path): count for path in [*files(), *tests] if (count := len(path.read_text().splitlines())) > 400}
    assert not long, long


def test_no_plain_kernels_package() -> None:
    """A kernels/__init__.py would shadow the Hugging Face package that transformers imports."""
    assert not (REPOSITORY / "kernels" / "__init__.py").exists()
    assert not (REPOSITORY / "hybridize" / "kernels").exists()


@pytest.mark.skipif(os.name == "nt", reason="no executable bit")
def test_ci_can_be_run() -> None:
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)
