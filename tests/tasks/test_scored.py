"""Which tokens of text and of retrieval items are scored, and how rows are batched."""

from types import SimpleNamespace

import torch

from hybridize.tasks.scored import score_answers, score_text


def test_text_is_scored_in_its_later_half_evenly():
    rows = torch.arange(500).view(5, 100)
    batches = score_text(rows, "code", batch_tokens=250, per_row=10)
    assert [len(batch.ids) for batch in batches] == [2, 2, 1]
    assert {batch.group for batch in batches} == {"code"}
    assert torch.equal(torch.cat([batch.ids for batch in batches]), rows)
    for batch in batches:
        for targets in batch.targets:
            assert targets.nonzero()[:, 0].tolist() == [54, 59, 64, 69, 74, 79, 84, 89, 94, 99]


def test_short_rows_are_scored_in_all_of_their_later_half():
    batches = score_text(torch.zeros(5, 100, dtype=torch.int64), "prose", batch_tokens=1)
    assert len(batches) == 5  # one row at least, however few tokens are allowed
    assert batches[0].targets.nonzero()[:, 1].tolist() == list(range(50, 100))
    assert score_text(torch.zeros(1, 3, dtype=torch.int64), "prose", 9)[0].targets.tolist() == [[False, True, True]]


def test_items_are_batched_by_task_and_length_and_scored_on_their_answers():
    kinds = [("recall", 8), ("copy", 6), ("recall", 6), ("recall", 8), ("recall", 8)]
    items = [
        SimpleNamespace(task=task, ids=torch.arange(length) + 10 * number, answer=(length - 2 - number % 2, length))
        for number, (task, length) in enumerate(kinds)
    ]
    batches = score_answers(items, batch_tokens=16)
    assert [(b.group, tuple(b.ids.shape)) for b in batches] == [
        ("copy", (1, 6)),
        ("recall", (1, 6)),
        ("recall", (2, 8)),
        ("recall", (1, 8)),
    ]
    rows = {int(ids[0]) // 10: (ids, targets) for b in batches for ids, targets in zip(b.ids, b.targets, strict=True)}
    for number, item in enumerate(items):
        ids, targets = rows[number]
        assert torch.equal(ids, item.ids)
        assert targets.nonzero()[:, 0].tolist() == list(range(*item.answer))
