"""The package is whole in a wheel, an editable install and a checkout, and lives beside Hugging Face's `kernels`."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import hybridize

REPOSITORY = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
Python = Callable[..., subprocess.CompletedProcess[str]]

# Builds a model through the Auto classes and uses a kernel; `kernels` must be Hugging Face's package or absent.
USE = """
import importlib.util, sys
import hybridize.kernels.gdn, torch
q = k = v = torch.ones(1, 3, 2, 4)
o, state = hybridize.kernels.gdn.chunk_gated_delta_rule(q, k, v, -torch.ones(1, 3, 2), torch.ones(1, 3, 2))
assert o.shape == v.shape and o.isfinite().all()
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import is_kernels_available
config = Qwen2Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1)
model = AutoModelForCausalLM.from_config(config)
assert model(torch.zeros(1, 2, dtype=torch.long)).logits.shape == (1, 2, 8)
spec = importlib.util.find_spec("kernels")
print(hybridize.__file__, getattr(spec, "origin", None), is_kernels_available(), sep="\\n")
"""


def in_repository(code: str, *paths: Path) -> list[str]:
    """Runs code with the repository root as working directory (and first on sys.path), and more paths behind it."""
    behind = [*map(str, paths), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in behind if part)}
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_list_of_packages_is_that_of_the_folders() -> None:
    folders = {path.parent.relative_to(REPOSITORY) for path in (REPOSITORY / "hybridize").rglob("__init__.py")}
    names = {".".join(folder.parts) for folder in folders}
    kernels = {path.parent.relative_to(REPOSITORY) for path in (REPOSITORY / "kernels").rglob("*.py")}
    names |= {".".join(("hybridize", *folder.parts)) for folder in kernels}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == names, "update tool.setuptools.packages in pyproject.toml"


def test_versions_agree() -> None:
    assert PROJECT["project"]["version"] == hybridize.__version__


def test_import_is_light_and_names_are_lazy(python: Python) -> None:
    code = (
        "import sys, hybridize\n"
        "heavy = {'torch', 'transformers', 'numpy', 'typer', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert set(hybridize.__all__) <= set(dir(hybridize))\n"
        "try:\n    hybridize.nothing\nexcept AttributeError as error:\n    print(error)\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "module 'hybridize' has no attribute 'nothing'\n"


@pytest.mark.parametrize("name", sorted(hybridize._PUBLIC))
def test_public_names_load(name: str) -> None:
    value = getattr(hybridize, name)
    assert callable(value) and value is getattr(hybridize, name)


ORDERS = {
    "hybridize first": "import hybridize\nfrom transformers import AutoConfig",
    "transformers first": "from transformers import AutoConfig\nimport hybridize",
    "Auto classes last": "import transformers\nimport hybridize\nfrom transformers import AutoConfig",
    "a model first": "import hybridize\nfrom transformers import LlamaForCausalLM, AutoConfig",
    "two threads": (
        "import hybridize, threading\n"
        "def load():\n    from transformers import AutoModelForCausalLM\n"
        "threads = [threading.Thread(target=load) for _ in range(4)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]"
    ),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_auto_classes_know_hybrids_in_either_order(python: Python, order: str) -> None:
    check = (
        "\nimport sys, inspect\n"
        "from transformers import AutoConfig, CONFIG_MAPPING\n"
        "from transformers.models.auto import configuration_auto\n"
        "assert 'hybridize_llama' in CONFIG_MAPPING\n"
        "assert AutoConfig.for_model('hybridize_llama').model_type == 'hybridize_llama'\n"
        "assert not [finder for finder in sys.meta_path if type(finder).__module__ == 'hybridize._hook']\n"
        "assert configuration_auto.__loader__ is configuration_auto.__spec__.loader\n"
        "assert 'CONFIG_MAPPING' in inspect.getsource(configuration_auto)\n"
    )
    done = python("-W", "error::RuntimeWarning", "-c", order + check)
    assert done.returncode == 0, done.stderr


# Imports each module in a child of its own, in which torch is loaded and the Auto classes are not.
EACH_FIRST = """
import os, sys, traceback, warnings
import hybridize, torch, transformers.configuration_utils
assert "transformers.models.auto.configuration_auto" not in sys.modules
warnings.simplefilter("error", RuntimeWarning)
failed = []
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            __import__(name)
            from transformers import CONFIG_MAPPING
            code = 0 if "hybridize_llama" in CONFIG_MAPPING else 1
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
sys.exit(f"failed: {failed}" if failed else 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_any_module_can_be_imported_first(python: Python) -> None:
    """Registration runs in the middle of whatever import loads the Auto classes; no half-imported module may matter."""
    rooms = [REPOSITORY / "hybridize" / room for room in ("hybrid", "mixers", "priming", "probing", "tasks")]
    paths = [path.relative_to(REPOSITORY).with_suffix("") for room in rooms for path in room.glob("*.py")]
    names = sorted({".".join(path.parts).removesuffix(".__init__") for path in paths})
    assert len(names) > 15
    done = python("-c", EACH_FIRST, *names, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_failing_registration_warns_and_spares_transformers(python: Python) -> None:
    code = (
        "import sys; sys.modules['hybridize.hybrid.registry'] = None\n"
        "import hybridize\n"
        "from transformers import AutoConfig; print(AutoConfig.for_model('llama').model_type)"
    )
    done = python("-c", code)
    assert done.returncode == 0 and done.stdout == "llama\n"
    assert "hybridize could not register its models" in done.stderr


def test_a_checkout_works_without_being_installed() -> None:
    lines = in_repository(USE)
    assert lines[0] == str(REPOSITORY / "hybridize" / "__init__.py")


def test_hugging_face_kernels_is_not_shadowed_in_a_checkout(tmp_path: Path) -> None:
    """A stand-in for the Hugging Face package, of a version that transformers accepts, behind the repository root."""
    from transformers.utils import import_utils

    version = getattr(import_utils, "KERNELS_MIN_VERSION", "0.17.0")
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text(
        f"__version__ = {str(version)!r}\n"
        "class Anything:\n"
        "    def __getattr__(self, name):\n        return self\n"
        "    def __call__(self, *args, **kwargs):\n        return self\n"
        "def __getattr__(name):\n"
        "    if name.startswith('__'):\n        raise AttributeError(name)\n"
        "    if name.startswith('use_kernel') and name != 'use_kernel_mapping':\n"
        "        return lambda *names, **options: lambda decorated: decorated\n"
        "    return Anything()\n"
    )
    info = tmp_path / f"kernels-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    lines = in_repository(USE, tmp_path)
    assert lines == [str(REPOSITORY / "hybridize" / "__init__.py"), str(package / "__init__.py"), "True"]


def pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """The interpreter of a new environment that sees this one's packages, apart from an installed hybridize."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    show = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip())
    origin = importlib.util.find_spec("torch")
    assert origin is not None and origin.origin is not None
    # Links, because a hybridize installed out there would be found before an editable one in here.
    outer = tmp_path / "outer"
    outer.mkdir()
    for entry in Path(origin.origin).parent.parent.iterdir():
        if "hybridize" not in entry.name:
            (outer / entry.name).symlink_to(entry)
    (site / "outer.pth").write_text(str(outer))
    return python


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wheel", "editable"])
def test_installed(environment: Path, tmp_path: Path, how: str) -> None:
    """A real build and install, used from the repository root and from elsewhere, through Python and the script."""
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=REPOSITORY, capture_output=True)
    names = tracked.stdout.decode().split("\n") if tracked.returncode == 0 else []
    for name in names or [str(path.relative_to(REPOSITORY)) for path in REPOSITORY.rglob("*.*")]:
        path = REPOSITORY / name
        if path.is_file() and not name.startswith("tests/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(path.read_bytes())
    if how == "wheel":
        pip(environment, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(source))
        (wheel,) = tmp_path.glob("*.whl")
        content = zipfile.ZipFile(wheel).namelist()
        assert not [name for name in content if not re.match(r"hybridize(/|-[\d.]+\.dist-info/)", name)]
        assert "hybridize/kernels/gka/__init__.py" in content and "hybridize/kernels/__init__.py" not in content
        assert any(name.endswith("licenses/LICENSE") for name in content)
        pip(environment, "install", "--no-deps", "--force-reinstall", str(wheel))
    else:
        pip(environment, "install", "--no-deps", "--force-reinstall", "--editable", str(source))
    script = environment.with_name("hybridize")
    for folder in (source, tmp_path):
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        for command in ([str(environment), "-c", USE], [str(script), "--version"]):
            done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
            assert done.returncode == 0, f"{how} from {folder}: {done.stderr}"
        in_checkout = how == "editable" or folder == source
        where = subprocess.run(
            [str(environment), "-c", "import hybridize; print(hybridize.__file__)"],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
        ).stdout
        assert where.startswith(str(source)) == in_checkout, where
