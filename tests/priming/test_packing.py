"""Packed rows lose no token and leak nothing: each document in them is as it is alone."""

import numpy as np
import pytest
import torch
from data_case import documents, equal, stream, tokenizer
from hybrid_cases import check_equal, hybrid, run, source

from hybridize.priming.batches import Batch
from hybridize.priming.packing import Packer
from hybridize.priming.stream import stack


def packed(lengths, context=64, whole=False, seed=0):
    """Rows of documents of those lengths until no full one is left, and the packer."""
    packer = Packer(context, 0, seed)
    generator = np.random.default_rng(0)
    given = []
    for length in lengths:
        ids = generator.integers(1, 64, length)
        given.append(ids.tolist())
        packer.add(ids, np.ones(length, bool), whole)
    rows = []
    while packer.ready():
        rows.append(packer.row())
    return stack(rows), packer, given


def test_each_token_is_in_one_row_and_short_documents_are_whole() -> None:
    lengths = [5, 64, 200, 1, 40, 24, 63, 2, 129, 31, 30] * 3
    batch, packer, given = packed(lengths)
    assert batch.ids.shape[1] == 64
    left = [token for piece in packer.pieces for token in piece.ids.tolist()]
    assert sorted([*batch.ids.flatten().tolist(), *left]) == sorted(token for ids in given for token in ids)
    assert packer.tokens == len(left) < 64
    parts = {tuple(ids) for ids in documents(batch)}
    assert sum(tuple(ids) in parts for ids in given if len(ids) <= 64) >= 20, "few are cut"
    assert (batch.targets == (batch.positions > 0)).all()


def test_conversations_are_padded_rather_than_cut() -> None:
    batch, packer, given = packed([40] * 5 + [20] * 2, whole=True)
    parts = [ids for ids in documents(batch)]
    assert all(ids in parts for ids in given if ids not in [p.ids.tolist() for p in packer.pieces])
    padding = [ids for ids in parts if ids not in given]
    assert padding and not any(any(ids) for ids in padding)
    assert not batch.targets[batch.ids == 0].any()


def test_padding_is_not_real() -> None:
    batch, _, _ = packed([40] * 5, whole=True)
    assert torch.equal(batch.real, batch.ids > 0)
    alone = Batch.of(batch.ids)
    assert alone.real.all() and torch.equal(alone.positions, torch.arange(64).expand_as(alone.ids))
    assert Batch.of(batch) is batch


def test_a_document_longer_than_the_row_is_cut(tmp_path) -> None:
    path = tmp_path / "long.txt"
    path.write_text(" ".join(map(str, range(3000))))
    one, _ = stream(str(path))
    texts = [tokenizer().decode(ids) for _ in range(40) for ids in documents(one.batch())]
    assert all(text in path.read_text() for text in texts)
    assert one.counts["dropped_tokens"] == 0


def test_a_conversation_longer_than_the_row_gives_the_parts_that_have_answers() -> None:
    packer = Packer(64, 0, 0)
    said = np.zeros(150, bool)
    said[140:] = True
    assert packer.add(np.ones(150, int), said, True) == (22, 128)


def test_rows_depend_on_the_seed_only() -> None:
    lengths = [30, 50, 64, 64, 20, 10, 5] * 4
    assert equal(packed(lengths)[0], packed(lengths)[0])
    assert not equal(packed(lengths)[0], packed(lengths, seed=1)[0])


@pytest.mark.parametrize("model", ["mixed", "attention"])
def test_nothing_leaks_between_the_documents_of_a_row(model) -> None:
    model = source("llama") if model == "attention" else hybrid("llama", model)
    batch, _, _ = packed([30, 20, 14, 17, 47, 64, 9, 70, 13, 44])
    assert len(batch.ids) > 3 and ((batch.positions == 0).sum(1) > 1).any()
    # What transformers needs to see the borders: no mask, and no cache.
    out = run(model, batch.ids, position_ids=batch.positions, use_cache=False).logits
    plain = run(model, batch.ids, use_cache=False).logits
    assert (out - plain).abs().max() > 1e-2, "documents must matter"
    alone = [run(model, torch.tensor([ids]), use_cache=False).logits[0] for ids in documents(batch)]
    check_equal({"logits": out.flatten(0, 1)}, {"logits": torch.cat(alone)}, "packed")
