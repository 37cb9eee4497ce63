"""A pushed hybrid loads where hybridize is not, with code that is made from this package."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from hybrid_cases import FAMILIES, make, tokens

import hybridize
from hybridize.checksums import read_checksums, sha256
from hybridize.hub.bundle import bundle
from hybridize.hub.preflight import read_config
from hybridize.hub.remote_code import CODE, modelling_code, write_remote_code

GKA = {"num_iters": 6, "ridge": 0.1}
MODELS = {
    "mixed": ("llama", "*-GKA-SWA-GDN-M2", {"window": 8, "sinks": 2, **GKA}),
    "experts": ("qwen3_moe", "GKA-*-SWA", {"window": 8, "sinks": 2, **GKA}),
    "fused": ("phi3", "M2-*-GDN", {}),
}
LOAD = """
import json, sys, torch
try:
    import hybridize
except ImportError:
    pass
else:
    sys.exit("hybridize is here")
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    want = torch.load(folder + "/want.pt")
    got = model(want["ids"]).logits
    padded = model(want["ids"], attention_mask=want["mask"]).logits[:, -1]
    written = model.generate(want["ids"], max_new_tokens=8, do_sample=False, num_beams=2)
    model.save_pretrained(folder + "/again")
    again = AutoModelForCausalLM.from_pretrained(folder + "/again", trust_remote_code=True)
    print(json.dumps({
        "class": type(model).__name__,
        "difference": max((got - want["logits"]).abs().max().item(), (padded - want["padded"]).abs().max().item()),
        "same text": torch.equal(written, want["written"]),
        "saved": torch.equal(again(want["ids"]).logits, got),
        "fp32 decays": all(p.dtype == torch.float32 for n, p in model.named_parameters() if n.endswith("A_log")),
    }))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The Python of an environment with all that is installed here, hybridize apart."""
    place = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    packages = next(place.glob("lib*/python*/site-packages"))
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "hybridize" not in path.name and not path.name.endswith(".pth"):
            (packages / path.name).symlink_to(path)
    return place / "bin" / "python"


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """Folders with modelling code, and what their models make of some tokens."""
    folders = {}
    for name, (case, pattern, settings) in MODELS.items():
        folder = folders[name] = tmp_path_factory.mktemp(name)
        model = make(case, pattern, settings)
        model.save_pretrained(folder)
        write_remote_code(folder, read_config(folder))
        ids, mask = tokens(2, 70), torch.ones(2, 70, dtype=torch.long)
        mask[1, :9] = 0
        with torch.no_grad():
            want = {"ids": ids, "mask": mask, "logits": model(ids).logits}
            want["padded"] = model(ids, attention_mask=mask).logits[:, -1]
            want["written"] = model.generate(ids, max_new_tokens=8, do_sample=False, num_beams=2)
        torch.save(want, folder / "want.pt")
    return folders


def test_without_hybridize(bare, pushed, tmp_path):
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    # From elsewhere: a checkout is a package to whoever stands in it.
    words = [bare, "-c", LOAD, *map(str, pushed.values())]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(zip(pushed, map(json.loads, done.stdout.splitlines()), strict=True))
    for name, (case, _, _) in MODELS.items():
        assert found[name].pop("difference") < 1e-5
        assert found[name] == {
            "class": f"Hybrid{FAMILIES[case]}",
            "same text": True,
            "saved": True,
            "fp32 decays": True,
        }


@pytest.mark.parametrize("trust", [None, True])
def test_with_hybridize_the_package_is_used(pushed, tmp_path, trust):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pushed["mixed"], trust_remote_code=trust)
    assert type(model).__module__ == "hybridize.hybrid.model"
    model.save_pretrained(tmp_path)  # without the code, so without a word of it
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())


def test_a_push_writes_the_code_and_notes_its_sum(hub, push, folder):
    assert push(folder, "me/hybrid")[0] == 0
    files = hub.head("me/hybrid").files
    assert files[CODE].decode() == modelling_code("hybridize_llama")
    assert json.loads(files["config.json"])["auto_map"] == {
        "AutoConfig": "modeling_hybridize.HybridLlamaConfig",
        "AutoModelForCausalLM": "modeling_hybridize.HybridLlamaForCausalLM",
    }
    assert b"trust_remote_code=True" in files["README.md"]
    sums = read_checksums(folder)
    assert {name: sha256(folder / name) for name in (CODE, "config.json")}.items() <= sums.items()
    (folder / CODE).write_text(files[CODE].decode().replace("softplus", "sigmoid"))
    code, _, err = push(folder, "me/hybrid")
    assert code == 1 and f"{CODE}: is not what prime wrote" in err


def test_code_of_an_older_version_is_replaced(hub, push, folder):
    write_remote_code(folder, read_config(folder))
    (folder / "SHA256SUMS").unlink()
    (folder / CODE).write_text("# older\n")
    assert push(folder, "me/hybrid")[0] == 0
    assert hub.head("me/hybrid").files[CODE].decode() == modelling_code("hybridize_llama")


def test_the_code_stands_alone(tmp_path):
    code = modelling_code("hybridize_qwen3")
    assert "import hybridize" not in code and "from hybridize" not in code and "import triton" not in code
    assert f"hybridize {hybridize.__version__}" in code
    (tmp_path / CODE).write_text(code)
    # Undefined, unused and doubled names: what a wrong bundle would show.
    words = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F401,F811,F841", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


SAMPLE = {
    "one": '"""The first. And more."""\nimport math\nfrom PACKAGE.two import twice\n'
    "from PACKAGE.two import EPS as small\n"
    "EPS = 1\n\n\n# Above.\ndef start(x, EPS=EPS):\n    from PACKAGE.three import lazy\n\n"
    "    return [lazy(n) + small + EPS for n in x], twice(math.floor(2.5)), sum(twice for twice in (1, 2))\n\n\n"
    "def never():\n    return missing\n",
    "two": '"""The second."""\nfrom PACKAGE.three import passed_on as twice\n\nEPS = 10  # the other one\n',
    "three": '"""The third."""\n\n\nclass Box:\n    twice = 3\n\n'
    "    def get(self):\n        return twice\n\n\ntwice = 7\n\n\ndef passed_on(x):\n    if uses_triton(x):\n"
    "        return nothing\n    return 2 * x + Box().get() + Box.twice\n\n\ndef lazy(x):\n    return 100 * x\n",
}


def test_names_keep_their_meaning(tmp_path, monkeypatch):
    """Shadowed, renamed, passed on, imported late, and the same in two modules."""
    (tmp_path / "bundled_sample").mkdir()
    (tmp_path / "bundled_sample" / "__init__.py").write_text("")
    for name, source in SAMPLE.items():
        (tmp_path / "bundled_sample" / f"{name}.py").write_text(source.replace("PACKAGE", "bundled_sample"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("hybridize.hub.bundle.PACKAGE", "bundled_sample")
    code, places = bundle([("bundled_sample.one", "start")])
    assert ("bundled_sample.one", "never") not in places and "nothing" not in code
    assert "# one: The first.\n" in code and "# Above.\ndef start" in code
    space: dict = {}
    exec(code, space)
    assert space["start"]([1, 2]) == ([111, 211], 14, 3)
    with pytest.raises(LookupError, match="neither defines nor imports absent"):
        bundle([("bundled_sample.one", "absent")])
