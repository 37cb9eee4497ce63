"""Questions of long text, read plainly and in chunks."""

import pytest
import torch
from hybrid_cases import make, source, tokens

from hybridize.composition.evaluate import Way, answers, pieces, text_losses
from hybridize.errors import UsageError
from hybridize.tasks.perplexity import token_losses
from hybridize.tasks.retrieval import Item, measure

WAYS = [Way.parse(text) for text in ("plain", "picaso", "soup/window", "ordered/concat/sequential", "none/full")]


def item(number, length=60, body=(7, 50), answer=56):
    return Item("passkey", length, 0.5, tokens(1, length, number)[0], (answer, length), body)


@pytest.fixture(scope="module", params=["GDN-*-M2", None])
def model(request):
    return make("llama", request.param) if request.param else source("llama")


def test_one_piece_is_plain_reading(model):
    items = [item(n) for n in range(3)]
    found = answers(model, items, WAYS, 60, set())
    plain, right = measure(model, items, 60)
    for name, (log_probability, first) in found.items():
        if not name.startswith("none") or not hasattr(model.config, "hybrid"):
            assert torch.allclose(log_probability, plain, atol=1e-4), name
            assert torch.equal(first, right)
    rows = tokens(2, 50)
    losses = text_losses(model, rows, 12, WAYS[:2], 50, set())
    assert losses["plain"] == pytest.approx(token_losses(model, rows)[:, -11:].mean().item(), abs=1e-4)
    assert losses["picaso"] == pytest.approx(losses["plain"], abs=1e-4)


def test_several_pieces_differ_and_each_item_counts(model):
    items, seen = [item(n) for n in range(2)], []
    found = answers(model, items, WAYS, 35, set(), seen.append)
    assert seen == [1, 1] and list(found) == [str(way) for way in WAYS]
    plain = found["plain"][0]
    assert torch.allclose(plain, measure(model, items, 60)[0], atol=1e-4)
    assert not torch.allclose(found["picaso"][0], plain, atol=1e-3)
    assert not torch.allclose(found["soup/window"][0], found["picaso"][0], atol=1e-4)


def test_pieces_are_few_even_and_end_with_a_line():
    body = torch.arange(100)
    assert [len(part) for part in pieces(body, 100, set())] == [100]
    assert [len(part) for part in pieces(body, 40, set())] == [34, 34, 32]
    cut = pieces(body, 40, {30, 31, 65, 66})
    assert torch.equal(torch.cat(cut), body) and [int(part[-1]) for part in cut] == [31, 65, 99]
    for size in (1, 3, 34, 50, 99):  # never too long, and never more of them than must be
        cut = pieces(body, size, set(range(0, 100, 7)))
        assert torch.equal(torch.cat(cut), body)
        assert len(cut) == -(-100 // size) and max(map(len, cut)) <= size


@pytest.mark.parametrize("text", ["nothing", "picaso/all", "soup/concat/nowhere"])
def test_ways_that_are_none(text):
    with pytest.raises(UsageError, match=r"no (way|composition)"):
        Way.parse(text)


def test_ways_are_named_as_they_are_given():
    assert [str(way) for way in WAYS] == ["plain", "picaso", "soup/window", "ordered/concat/sequential", "none/full"]


def test_no_room(model):
    with pytest.raises(UsageError, match="7 tokens before the text and 10 behind it"):
        answers(model, [item(0)], WAYS, 20, set())
