"""Every way in which a finished folder can be wrong is found, and the file is named."""

import json
import os
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hybridize.checksums import SUMS, read_checksums, write_checksums
from hybridize.console import Console
from hybridize.errors import CheckpointError
from hybridize.hub.origin import find_origin
from hybridize.hub.preflight import check_folder, read_config
from hybridize.weights import INDEX

EMBEDDING, DECAY, NORM = "model.embed_tokens.weight", "model.layers.1.self_attn.A_log", "model.norm.weight"


def check(folder):
    raw = read_config(folder)
    return check_folder(folder, raw, find_origin(raw["hybrid"]["source"]), Console(quiet=True))


def shard_of(folder, tensor):
    return json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_tensors(folder, tensor, change):
    """Change the tensors of the shard that holds `tensor`, its name in the index left as it is; returns the shard."""
    name = shard_of(folder, tensor)
    held = load_file(folder / name)
    change(held)
    save_file(held, folder / name, metadata={"format": "pt"})
    return name


def replace(tensor, new):
    return lambda folder: edit_tensors(folder, tensor, lambda held: held.update({tensor: new(held[tensor])}))


def flip(folder, tensor, bit):
    """Flip one bit of the tensor's first number; returns the shard."""
    name = shard_of(folder, tensor)
    content = bytearray((folder / name).read_bytes())
    length = struct.unpack("<Q", content[:8])[0]
    begin = json.loads(content[8 : 8 + length])[tensor]["data_offsets"][0]
    content[8 + length + begin + bit // 8] ^= 1 << bit % 8
    (folder / name).write_bytes(content)
    return name


def cut(folder):
    path = folder / shard_of(folder, EMBEDDING)
    os.truncate(path, path.stat().st_size - 10)
    return path.name


def write(name, content):
    def do(folder):
        (folder / name).write_bytes(content)
        return name

    return do


def write_shard(content):
    return lambda folder: write(shard_of(folder, EMBEDDING), content)(folder)


def delete(name):
    def do(folder):
        (folder / name).unlink()
        return name

    return do


def edit(name, change):
    def do(folder):
        edit_json(folder / name, change)
        return name

    return do


def in_two_shards(folder):
    held = load_file(folder / shard_of(folder, NORM))[NORM]
    return edit_tensors(folder, EMBEDDING, lambda other: other.update({NORM: held}))


def lost_everywhere(folder):
    edit_tensors(folder, NORM, lambda held: held.pop(NORM))
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop(NORM))
    return INDEX


def both_forms(folder):
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    return "model.safetensors"


def tied(folder):
    edit_json(folder / "config.json", lambda config: config.update(tie_word_embeddings=True))
    return shard_of(folder, "lm_head.weight")


def broken_link(folder):
    (folder / "notes").symlink_to(folder / "nowhere")
    return "notes"


def one_end(generation):
    generation["eos_token_id"] = 7


def pattern(text):
    return lambda config: config["hybrid"].update(pattern=text)


def missing_shard(folder):
    return delete(shard_of(folder, EMBEDDING))(folder)


def drop_from_index(index):
    index["weight_map"].pop(NORM)


# what is done -> (how, what is said, whether the checksums are needed to see it)
DAMAGE = {
    "a shard is missing": (missing_shard, f"is missing, although {INDEX}", False),
    "a shard is cut short": (cut, "bytes where its header says", False),
    "a shard is empty": (write_shard(b""), "cut short", False),
    "a shard is a pointer": (write_shard(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "LFS", False),
    "a shard has a damaged header": (write_shard(struct.pack("<Q", 4) + b"{{{{"), "damaged header", False),
    "a byte of a tensor is flipped": (lambda folder: flip(folder, EMBEDDING, 0), "is not what prime wrote", True),
    "an exponent is flipped": (lambda folder: flip(folder, "lm_head.weight", 14), "implausible value", False),
    "a tensor holds NaN": (replace(EMBEDDING, lambda x: x * float("nan")), f"NaN or infinity in {EMBEDDING}", False),
    "a tensor has another shape": (replace(NORM, lambda x: x[:-1].clone()), f"{NORM} of shape [31]", False),
    "a decay is not in fp32": (replace(DECAY, lambda x: x.bfloat16()), "it should be in F32", False),
    "a weight is in fp32": (replace(NORM, lambda x: x.float()), "it should be in BF16", False),
    "config.json promises another format": (
        lambda folder: edit("config.json", lambda c: c.update(dtype="float16"))(folder) and shard_of(folder, NORM),
        "it should be in F16",
        False,
    ),
    "a tensor is in two shards": (in_two_shards, f"{NORM}, which", False),
    "a tensor is lost": (lost_everywhere, f"lacks the tensor {NORM}, which the model needs", False),
    "a tensor too many": (
        lambda folder: edit_tensors(folder, NORM, lambda held: held.update(more=torch.zeros(1))),
        "more, which the model does not have",
        False,
    ),
    "a tied head is stored": (tied, "lm_head.weight, which config.json ties", False),
    "the index does not name a tensor": (
        lambda folder: edit(INDEX, drop_from_index)(folder) and shard_of_norm(folder),
        f"{NORM}, which {INDEX} does not name",
        False,
    ),
    "the index has another size": (edit(INDEX, lambda i: i["metadata"].update(total_size=1)), "says 1 bytes", False),
    "the index is no index": (write(INDEX, b"[]"), "is not an index", False),
    "the index is cut short": (write(INDEX, b'{"weight_map": {'), "not valid JSON", False),
    "an old shard is left": (
        lambda folder: write("model-00009-of-00009.safetensors", b"x" * 20)(folder),
        "no part of this model",
        False,
    ),
    "one file and shards": (both_forms, "no part of this model", False),
    "other weights": (write("pytorch_model.bin", b"x"), "no part of this model", False),
    "a link to nothing": (broken_link, "link to nothing", False),
    "the pattern is short": (edit("config.json", pattern("*-GKA-GDN")), "nothing stands for layer 3", False),
    "the pattern has no such mixer": (edit("config.json", pattern("*-GKA-GDN-FOO")), "'FOO' at position 3", False),
    "the pattern is another": (
        lambda folder: edit("config.json", pattern("*-GKA-*-M2"))(folder) and shard_of(folder, DECAY.replace("1", "2")),
        "which the model does not have",
        False,
    ),
    "config.json names another class": (
        edit("config.json", lambda c: c.update(architectures=["LlamaForCausalLM"])),
        "names the class",
        False,
    ),
    "config.json changed": (edit("config.json", lambda c: c.update(rms_norm_eps=1.0)), "is not what prime wrote", True),
    "the tokenizer is missing": (delete("tokenizer.json"), "is missing; copy it", False),
    "the tokenizer changed": (edit("tokenizer.json", lambda t: t.update(version="1.1")), "differs from that", False),
    "the tokenizer is cut short": (write("tokenizer.json", b'{"model": '), "not valid JSON", False),
    "the chat template is lost": (delete("chat_template.jinja"), f"although {SUMS} lists it", True),
    "an end token is lost": (edit("generation_config.json", one_end), "lacks the end tokens 9", False),
    "the generation config is lost": (delete("generation_config.json"), "is missing", False),
    "the licence is lost": (delete("LICENSE"), "is missing; copy it", False),
    "the report changed": (write("prime.json", b"{}"), "is not what prime wrote", True),
    "the sums are no sums": (write(SUMS, b"what?\n"), "is not a list of SHA-256 sums", True),
}


def shard_of_norm(folder):
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            if NORM in file.keys():  # noqa: SIM118
                return path.name
    raise AssertionError


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found(folder, untried, what):
    damage, said, by_sums = DAMAGE[what]
    if not by_sums:
        (folder / SUMS).unlink()
    file = damage(folder)
    found = [finding for finding in check(folder).findings if finding.file == file]
    assert any(said in finding.problem for finding in found), found


def test_a_sound_folder(place, folder):
    for path in (place / "hybrid", folder):
        found = check(path)
        assert found.findings == [] and found.tried and found.checksums
        assert found.contents.files.keys() == {p.name for p in path.iterdir()}
    (folder / SUMS).unlink()
    found = check(folder)
    assert found.findings == [] and not found.checksums


def test_all_damage_is_found_at_once(folder, untried):
    files = [DAMAGE[what][0](folder) for what in ("a weight is in fp32", "an end token is lost", "other weights")]
    assert set(files) <= {finding.file for finding in check(folder).findings}


def test_a_model_that_cannot_run_is_found(folder, monkeypatch):
    from hybridize.mixers.gdn import GDNMixer

    def fail(*arguments, **keywords):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(GDNMixer, "forward", fail)
    (found,) = check(folder).findings
    assert found.file == INDEX and "cannot be loaded and run (out of luck)" in found.problem


def test_a_folder_that_is_no_hybrid(place, folder):
    with pytest.raises(CheckpointError, match=r"config\.json is not a hybrid's"):
        read_config(place / "source")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_config(place / "text")
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        read_config(folder)


def test_sums_of_changed_files_can_be_noted_anew(folder):
    before = read_checksums(folder)
    edit_json(folder / "config.json", lambda config: config.update(note="mine"))
    write_checksums(folder, ["config.json"])
    after = read_checksums(folder)
    assert {name for name in after if after[name] != before[name]} == {"config.json"}
    assert check(folder).findings == []
