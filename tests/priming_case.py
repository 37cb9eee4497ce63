"""A pico source model with a tokenizer, on disk, for the tests of prime."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SMALL = ["--context", "32", "--batch-size", "2", "--init-tokens", "256", "--held-out-tokens", "256", "--device", "cpu"]
SMALL += ["--items", "0", "--prompts", "0"]
WORDS = ["the", "of", "and", "to", "a", "in", "that", "it", "is", "was", "he", "for", "on", "are", "with", "as"]


def save_source(folder: Path, vocab_size: int = 256) -> Path:
    """A 4-layer Llama with weights large enough to attend, a byte tokenizer, a chat template and two EOS ids."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=[7, 9],
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 4
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template="{{ messages[0]['content'] }}")
    fast.save_pretrained(folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [7, 9], "temperature": 0.5}, indent=3))
    return folder


def save_text(folder: Path, words: int = 4000) -> Path:
    """A folder of a few text files of random words."""
    folder.mkdir()
    pick = random.Random(0)
    for number in range(30):
        (folder / f"{number}.txt").write_text(" ".join(pick.choices(WORDS, k=words // 30)))
    return folder
