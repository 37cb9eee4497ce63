"""Tokenizers of several kinds, made on the spot, and text for them, for the tests of tasks."""

import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|im_start|>[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TASK_TEXT = (
    "A pass key is hidden in the text below. Remember it. The pass key is 12345. What is the pass key? Numbers are "
    "hidden in the text below. The number of the amber anchor is 1234. A quotation is hidden. The quotation is: "
)


def documents(count=12, words=300):
    """Documents of words that occur once only in all of them."""
    pick = random.Random(1)
    syllables = ["ba", "ke", "li", "mo", "nu", "ra", "se", "ti", "vo", "za"]
    names = ["".join(syllables[int(digit)] for digit in f"{n:04}") + "s" * (n % 4) for n in range(count * words)]
    pick.shuffle(names)
    lines = [" ".join(names[start : start + 10]) for start in range(0, len(names), 10)]
    size = words // 10
    return ["\n".join(lines[size * n : size * (n + 1)]) for n in range(count)]


FILLER = documents()


def trained(pre_tokenizer, decoder, **options):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*FILLER, TASK_TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=SPECIAL, **options)


def byte_pairs(template):
    pieces = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return trained(pieces, decoders.ByteLevel(), chat_template=template)


def single_bytes():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template="{{ messages[0]['content'] }}")


def with_ends():
    """Neither a chat template nor anything else, but special tokens around every text."""
    tokenizer = byte_pairs(None)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[(name, n) for n, name in enumerate(SPECIAL)]
    )
    return tokenizer


def metaspace():
    return trained(pre_tokenizers.Metaspace(), decoders.Metaspace())


class Slow:
    """A tokenizer that cannot say where its tokens lie in the text."""

    is_fast = False

    def __init__(self, tokenizer):
        self.tokenizer, self.chat_template = tokenizer, tokenizer.chat_template

    def __call__(self, text, *, add_special_tokens=True, verbose=True):
        return self.tokenizer(text, add_special_tokens=add_special_tokens)

    def decode(self, ids):
        return self.tokenizer.decode(ids)

    def apply_chat_template(self, messages, **options):
        return self.tokenizer.apply_chat_template(messages, **options)


KINDS = {
    "chat": lambda: byte_pairs(CHATML),
    "no-generation-prompt": lambda: byte_pairs(TURNS),
    "bytes": single_bytes,
    "special-tokens": with_ends,
    "metaspace": metaspace,
    "slow": lambda: Slow(byte_pairs(CHATML)),
}
