"""What is measured on retrieval items, and how it is summed up."""

from types import SimpleNamespace

import pytest
import torch
from hybrid_cases import VOCAB, hybrid, source

from hybridize.builtin import builtin_text, open_builtin
from hybridize.tasks.retrieval import TASKS, Item, make_items, measure, summary, wilson


class Oracle:
    """A model that is sure of each next token, but for those (row's first token, place) that it is told to miss."""

    SURE = 3.0

    def __init__(self, vocabulary, missed=()):
        self.config = SimpleNamespace(vocab_size=vocabulary)
        self.missed, self.shapes = dict(missed), []

    def get_input_embeddings(self):
        return SimpleNamespace(weight=torch.zeros(1))

    def get_output_embeddings(self):
        return torch.nn.Identity()

    def base_model(self, input_ids, use_cache):
        self.shapes.append(tuple(input_ids.shape))
        after = input_ids.roll(-1, 1)
        for row in after:
            if (place := self.missed.get(int(row[-1]))) is not None:
                row[place - 1] += 1
        hidden = torch.nn.functional.one_hot(after, self.config.vocab_size).float() * self.SURE
        return SimpleNamespace(last_hidden_state=hidden)


def test_measures_what_a_model_knows():
    lengths = [6, 9, 6, 9, 6]
    items = [
        Item("copy", n, 0.5, torch.tensor([10 * number, *range(1, n)]), (n - 3, n), (1, 2))
        for number, n in enumerate(lengths)
    ]
    # Row 10 misses one token of its answer, row 20 its last one, and row 30 the one before the answer.
    oracle, told = Oracle(60, {10: 7, 20: 5, 30: 5}), []
    log_probability, right = measure(oracle, items, 12, told.append)
    total = torch.tensor([3.0, *[0.0] * 59]).exp().sum().log()
    sure, missed = 3 - total, (2 * 3 - 3 * total) / 3
    assert torch.allclose(log_probability, torch.stack([sure, missed, missed, sure, sure]))
    assert right.tolist() == [True, False, False, True, True]
    assert oracle.shapes == [(2, 6), (1, 6), (1, 9), (1, 9)] and told == [2, 1, 1, 1]


def pico_items(count=5, lengths=(20, 33)):
    torch.manual_seed(3)
    return [
        Item("copy", n, 0.5, torch.randint(2, VOCAB, (n,)), (n - 2 - number % 2, n), (1, 9))
        for number, n in enumerate(lengths * count)
    ]


@pytest.mark.parametrize("make", [lambda: source("llama"), lambda: hybrid("qwen3", "mixed")], ids=["source", "hybrid"])
def test_measures_as_the_whole_models_logits_have_it(make):
    model, items = make(), pico_items()
    log_probability, right = measure(model, items, 70)
    for item, value, good in zip(items, log_probability, right, strict=True):
        with torch.no_grad():
            logits = model(item.ids[None]).logits[0].float().log_softmax(-1)
        places = torch.arange(*item.answer)
        assert torch.allclose(logits[places - 1, item.ids[places]].mean(), value, atol=1e-4)
        assert bool((logits[places - 1].argmax(-1) == item.ids[places]).all()) == good


def test_right_is_what_greedy_decoding_gives():
    model, given = source("llama"), []
    for item in pico_items():
        prompt = item.ids[None, : item.answer[0]]
        new = item.answer[1] - item.answer[0]
        ids = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
        given.append(Item(item.task, item.length, item.depth, ids[0], item.answer, item.body))
    assert measure(model, given, 100)[1].all()
    for item in given:
        item.ids[-1] = (item.ids[-1] + 1) % VOCAB
    assert not measure(model, given, 100)[1].any()


def test_measures_a_model_whose_weights_are_elsewhere():
    from accelerate import cpu_offload

    model, items = source("llama"), pico_items()
    want = measure(model, items, 100)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.get_input_embeddings().weight.is_meta
    got = measure(model, items, 100)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_summary_by_hand():
    ids = torch.zeros(8, dtype=torch.int64)
    cells = [(512, 0.0), (512, 0.0), (512, 0.25), (1024, 0.0)]
    items = [Item("recall", length, depth, ids, (6, 8), (1, 5)) for length, depth in cells]
    items.append(Item("copy", 512, 1.0, ids, (6, 8), (1, 5)))
    found = summary(items, torch.tensor([-1.0, -2.0, -3.0, -6.0, -0.5]), torch.tensor([True, False, True, False, True]))
    assert list(found) == ["recall", "copy"]
    recall = found["recall"]
    assert (recall["items"], recall["accuracy"], recall["log_probability"]) == (4, 0.5, -3.0)
    assert recall["accuracy_ci"] == pytest.approx([0.1500, 0.8500], abs=1e-4)
    # The squares about -3 are 4, 1, 0 and 9: a standard error of sqrt(14 / 3 / 4).
    assert recall["log_probability_ci"] == pytest.approx([-3 - 2.1170, -3 + 2.1170], abs=1e-4)
    mean = lambda part: {key: (cell["items"], cell["accuracy"], cell["log_probability"]) for key, cell in part.items()}
    assert mean(recall["by_length"]) == {"512": (3, pytest.approx(2 / 3), -2.0), "1024": (1, 0.0, -6.0)}
    assert mean(recall["by_depth"]) == {"0": (3, pytest.approx(1 / 3), -3.0), "0.25": (1, 1.0, -3.0)}
    assert mean(recall["cells"]["512"]) == {"0": (2, 0.5, -1.5), "0.25": (1, 1.0, -3.0)}
    assert mean(recall["cells"]["1024"]) == {"0": (1, 0.0, -6.0)}
    assert recall["cells"]["1024"]["0"]["log_probability_ci"] is None
    assert mean(found["copy"]["cells"]["512"]) == {"1": (1, 1.0, -0.5)}


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 20, 0.0, 0.1611), (20, 20, 0.8389, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_interval_of_published_values(right, count, low, high):
    assert wilson(right, count) == pytest.approx([low, high], abs=1e-4)


def test_the_built_in_model_finds_what_is_hidden():
    """Chance is one in 100,000 for a pass key, and less than 1e-12 for six words."""
    built_in = open_builtin()
    filler = [document.text for document in builtin_text("held-out")]
    items = make_items(built_in.tokenizer, filler, lengths=(192,), depths=3, per_cell=2)
    model = built_in.load(torch.float32, torch.device("cpu"))
    found = summary(items, *measure(model, items, 192))
    assert "<|im_start|>assistant\nThe pass key is" in built_in.tokenizer.decode(items[0].ids)
    assert found["passkey"]["accuracy"] > 0.5
    assert found["passkey"]["log_probability"] > -0.5
    assert all(-2 < found[task]["log_probability"] < 0 for task in TASKS)
