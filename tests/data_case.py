"""Tokenizers with chat templates, and small data of every kind, for the tests of the training stream."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridize.priming.stream import open_stream

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|bos|>"]

SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA3 = """{{- '<|bos|>' }}{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

# Like Qwen3: an empty thought stands before the last answer, and before none that was given earlier.
QWEN3 = """{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' and loop.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{{- message['content'] + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

MARKED = """{% for message in messages %}{% if message['role'] == 'assistant' %}<|im_start|>assistant
{% generation %}{{ message['content'] }}{% endgeneration %}<|im_end|>
{% else %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endif %}{% endfor %}"""

# How many messages there are changes the rendering of all of them.
UNSTABLE = (
    "{{ messages | length }}: {% for message in messages %}{{ message['role'] + message['content'] }}{% endfor %}"
)


def tokenizer(template: str | None = None, special: bool = True) -> PreTrainedTokenizerFast:
    """A byte tokenizer, with the special tokens of several families behind the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=template)
    if special:
        fast.add_tokens([AddedToken(name, special=True) for name in SPECIAL], special_tokens=True)
        fast.eos_token = "<|im_end|>"
    return fast


def chat(number: int, turns: int = 1) -> list[dict[str, str]]:
    """A conversation that no other number gives."""
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Question {number}.{turn}?"})
        messages.append({"role": "assistant", "content": f"Answer {number}.{turn}" + "!" * (number % 5)})
    return messages


def text(number: int) -> str:
    """A document of 20 to about 300 bytes that no other number gives."""
    return f"<{number}> " + " ".join(f"w{number}-{i}" for i in range(3 + number * 7 % 40)) + "\n"


def make(kind: str, folder: Path, count: int = 40) -> str:
    """Data of a kind on disk, as --data names them."""
    if kind == "folder":
        place = folder / "texts"
        place.mkdir()
        for number in range(count):
            (place / f"{number}.txt").write_text(text(number))
        return str(place)
    path = folder / f"{kind}.jsonl"
    if kind == "chat":
        path.write_text("".join(json.dumps({"messages": chat(i, 1 + i % 3)}) + "\n" for i in range(count)))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"text": text(i)}) + "\n" for i in range(count)))
    elif kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow, of the extra data")
        import pyarrow

        path = folder / "some.parquet"
        parquet.write_table(pyarrow.table({"text": [text(i) for i in range(count)]}), path, row_group_size=7)
    else:
        ids = np.concatenate([[*tokenizer()(text(i))["input_ids"], 257] for i in range(count)])
        path = folder / f"some.{kind}"
        if kind == "npy":
            np.save(path, ids)
        else:
            ids.astype({"u16": "<u2", "u32": "<u4"}[kind]).tofile(path)
    return str(path)


KINDS = ["folder", "jsonl", "chat", "parquet", "npy", "u16", "u32"]


def stream(*data: str, template: str | None = SMOLLM2, special: bool = True, **options):
    """Stream and the rows that results are stated on, with small rows unless told otherwise."""
    fast = tokenizer(template, special)
    settings = {"vocabulary": len(fast), "context": 64, "batch_rows": 2, "seed": 0, "held_out_tokens": 256, **options}
    opened, held_out = open_stream(data, fast, **settings)
    return opened, held_out.stated


def equal(one, other) -> bool:
    """Whether two batches are the same, bit for bit."""
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("ids", "positions", "targets"))


def documents(batch) -> list[list[int]]:
    """The ids of the documents, or parts of documents, of a batch's rows."""
    found = []
    for ids, positions in zip(batch.ids, batch.positions, strict=True):
        starts = (positions == 0).nonzero()[:, 0].tolist()
        found += [ids[a:b].tolist() for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]
    return found
