"""Sources that open, and every kind that is refused with one sentence before its weights are read."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hybridize import sources
from hybridize.devices import pick_device, pick_dtype
from hybridize.errors import SourceError, UsageError
from hybridize.sources import open_source

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    """A copy of the pico Llama that a test may damage."""
    return shutil.copytree(llama_folder, tmp_path / "model")


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    assert len(found) > 2
    return found


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def refusal(target: str | Path, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(target, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_opens(folder: Path) -> None:
    source = open_source(folder)
    assert (source.name, source.path, source.config.model_type) == (str(folder), folder, "llama")
    model = source.load(device="cpu")
    assert isinstance(model, LlamaForCausalLM) and not model.training and model.dtype == torch.float32
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert source.load("bfloat16", "cpu").dtype == torch.bfloat16


def test_a_missing_path() -> None:
    assert "no folder or file ./nowhere" in refusal("./nowhere")
    assert "no folder or file /a/b/c" in refusal("/a/b/c")


def test_a_repository_that_is_out_of_reach() -> None:
    message = refusal("owner/name")
    assert message.startswith("owner/name") and "HF_HUB_OFFLINE" in message and "local folder" in message


def test_a_local_path_has_no_revision(folder: Path) -> None:
    assert "no revisions" in refusal(folder, revision="main")


def test_a_folder_without_a_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


@pytest.mark.parametrize("text", ["{broken", "[]", "{}", '{"model_type": 3}'])
def test_a_config_that_is_none(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json" in refusal(folder)


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "BertForMaskedLM, not a causal decoder"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a causal decoder"),
        ({"architectures": None, "model_type": "vit"}, "vit, not a causal decoder"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "not a causal decoder"),
        ({"is_encoder_decoder": True}, "not a causal decoder"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised (gptq)"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised (awq)"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised (fp8)"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantised (unknown)"),
        ({"text_config": {"quantization_config": {"quant_method": "bitsandbytes"}}}, "quantised (bitsandbytes)"),
        ({"model_type": "hybridize_llama"}, "is a hybrid already"),
        ({"hybrid": {"format": 1}}, "is a hybrid already"),
        ({"model_type": "brandnew"}, "no 'brandnew' models; a newer transformers"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "c.C"}}, "no 'own' models; it needs code of its own"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_a_kind_that_cannot_be_a_source(folder: Path, edit: dict[str, Any], part: str) -> None:
    change(folder / "config.json", lambda config: config.update(edit))
    assert part in refusal(folder)


def test_a_missing_shard(folder: Path) -> None:
    gone = shards(folder)[1]
    gone.unlink()
    message = refusal(folder)
    assert str(gone) in message and "is missing (shard 2 of" in message


@pytest.mark.parametrize("keep", [0, 5, 40, 0.5, -1], ids=str)
def test_a_truncated_shard(folder: Path, keep: float) -> None:
    path = shards(folder)[-1]
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    message = refusal(folder)
    assert str(path) in message and "bytes" in message


def test_a_shard_with_something_after_its_end(folder: Path) -> None:
    path = shards(folder)[0]
    path.write_bytes(path.read_bytes() + b"x")
    assert f"{path} has " in refusal(folder)


def test_a_damaged_header(folder: Path) -> None:
    path = shards(folder)[0]
    content = bytearray(path.read_bytes())
    content[8:12] = b"xxxx"
    path.write_bytes(content)
    assert f"{path} has a damaged header" in refusal(folder)


def test_a_pointer_in_place_of_the_weights(folder: Path) -> None:
    path = shards(folder)[0]
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 100\n")
    assert "git lfs pull" in refusal(folder)


def test_an_index_that_promises_too_much(folder: Path) -> None:
    first = shards(folder)[0].name
    change(folder / INDEX, lambda index: index["weight_map"].update({"model.extra": first}))
    assert "lacks the tensor model.extra" in refusal(folder)
    (folder / INDEX).write_text("{}")
    assert "not an index of weight files" in refusal(folder)


def test_no_weights_at_all(folder: Path) -> None:
    for path in [*shards(folder), folder / INDEX]:
        path.unlink()
    assert "has no weights" in refusal(folder)
    (folder / "pytorch_model.bin").touch()
    assert "save it again" in refusal(folder)


def test_weights_that_do_not_belong_to_the_config(folder: Path) -> None:
    change(folder / "config.json", lambda config: config.update(num_hidden_layers=3))
    with pytest.raises(SourceError, match=r"has 9 missing tensors \(first: model\.layers\.2\."):
        open_source(folder).load(device="cpu")
    change(folder / "config.json", lambda config: config.update(num_hidden_layers=1))
    with pytest.raises(SourceError, match=r"has 9 unexpected tensors \(first: model\.layers\.1\."):
        open_source(folder).load(device="cpu")


def test_weights_of_another_shape(folder: Path) -> None:
    change(folder / "config.json", lambda config: config.update(intermediate_size=64))
    with pytest.raises(SourceError, match=r"weights cannot be loaded|mismatched"):
        open_source(folder).load(device="cpu")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
def test_no_tokenizer(folder: Path, family: str) -> None:
    change(folder / "config.json", lambda config: config.update(model_type=family))
    with pytest.raises(SourceError, match=r"its tokenizer cannot be loaded|has no tokenizer: copy its files too"):
        _ = open_source(folder).tokenizer


def test_a_file_that_is_no_gguf(folder: Path) -> None:
    assert "not a GGUF file" in refusal(folder / "config.json")


def test_a_part_of_a_split_gguf(tmp_path: Path) -> None:
    path = tmp_path / "big-00001-of-00003.gguf"
    path.write_bytes(b"GGUF")
    assert "split GGUF" in refusal(path)


def test_several_ggufs(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert "holds 2 GGUF files" in refusal(tmp_path)


def test_gguf_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    find = importlib.util.find_spec
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    assert "pip install 'hybridize[gguf]'" in refusal(tmp_path)


def write_gguf(path: Path) -> torch.Tensor:
    """A one-layer pico Llama in Q8_0 with a byte-level tokenizer; returns its embedding as it must be read."""
    import numpy
    from gguf import GGMLQuantizationType, GGUFWriter, quants
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    width, inner, kind = 32, 64, GGMLQuantizationType.Q8_0
    tokens = ["<unk>", *bytes_to_unicode().values(), "ab", "cd"]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    random = numpy.random.default_rng(0)
    embedding = None
    for name, shape in {
        "token_embd": (len(tokens), width),
        "output": (len(tokens), width),
        "output_norm": (width,),
        "blk.0.attn_norm": (width,),
        "blk.0.ffn_norm": (width,),
        "blk.0.attn_q": (width, width),
        "blk.0.attn_k": (width // 2, width),
        "blk.0.attn_v": (width // 2, width),
        "blk.0.attn_output": (width, width),
        "blk.0.ffn_gate": (inner, width),
        "blk.0.ffn_up": (inner, width),
        "blk.0.ffn_down": (width, inner),
    }.items():
        values = random.standard_normal(shape).astype(numpy.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
            continue
        packed = quants.quantize(values, kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        if embedding is None:
            embedding = torch.from_numpy(quants.dequantize(packed, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert embedding is not None
    return embedding


def test_a_gguf_is_dequantised_and_can_be_saved_again(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    embedding = write_gguf(tmp_path / "tiny.gguf")
    for target in (tmp_path, tmp_path / "tiny.gguf"):
        source = open_source(target)
        assert (source.gguf, source.config.num_hidden_layers) == ("tiny.gguf", 1)
    model = source.load(device="cpu")
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert source.tokenizer("ab")["input_ids"][-1:] == [257]
    model.save_pretrained(tmp_path / "saved")
    source.tokenizer.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    again = open_source(tmp_path / "saved")
    state = again.load(device="cpu").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert again.tokenizer("ab")["input_ids"][-1:] == [257]


def test_a_truncated_gguf(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    content = path.read_bytes()
    for keep in (10, len(content) // 8, len(content) - 1000):
        path.write_bytes(content[:keep])
        with pytest.raises(SourceError, match=r"tiny\.gguf: its .* copy it again"):
            open_source(path).load(device="cpu")


def test_devices_and_dtypes() -> None:
    cpu = pick_device("cpu")
    assert pick_dtype(None, cpu) == torch.float32
    assert pick_dtype(None, torch.device("cuda")) == torch.bfloat16
    assert pick_dtype("float16", cpu) == pick_dtype(torch.float16, cpu) == torch.float16
    for bad in ("int8", "float33", "nn"):
        with pytest.raises(UsageError, match="floating-point type"):
            pick_dtype(bad, cpu)
    with pytest.raises(UsageError, match="no device that torch knows"):
        pick_device("warp:9:9")
    with pytest.raises(UsageError, match="--device cpu"):
        pick_device("cuda:99")


def test_a_model_can_be_spread_over_what_there_is(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(llama_folder)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        whole, spread = source.load("float32", "cpu")(ids), source.load("float32", "cpu", room={})(ids)
    assert torch.equal(whole.logits, spread.logits)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SourceError, match="does not fit on one GPU; to spread it, pip install accelerate"):
        source.load("float32", "cpu", room={0: 1})
