"""Layouts: which tokens are real, where documents begin, and that packing and unpacking are inverse."""

import pytest
import torch

from hybridize.mixers.tokens import PackedDocuments, PaddedRows, token_layout


def layout(positions, mask=None, began=False):
    mask = None if mask is None else torch.tensor(mask).bool()
    return token_layout(mask, None if positions is None else torch.tensor(positions), began)


def opens(*args, **kwargs):
    found = layout(*args, **kwargs)
    assert isinstance(found, PackedDocuments)
    return found.opens.int().tolist()


def test_one_document_needs_no_layout():
    assert layout(None) is None
    assert layout([[0, 1, 2]]) is None
    assert layout([[0, 1, 2]], [[1, 1, 1]]) is None
    assert layout([[5, 6, 9]], began=True) is None  # a leap ahead begins nothing
    assert layout(None, [[1, 1]]) is None


@pytest.mark.parametrize(
    ("positions", "mask", "began", "expected"),
    [
        ([[0, 1, 0, 1]], None, False, [[0, 0, 1, 0]]),
        ([[0, 1, 0, 1]], None, True, [[1, 0, 1, 0]]),
        ([[4, 5, 2, 2]], None, True, [[0, 0, 1, 1]]),
        ([[0, 1, 1, 0, 1]], [[1, 1, 0, 1, 1]], False, [[0, 0, 0, 1, 0]]),
        ([[0, 1, -1, 0, 1]], [[1, 1, 0, 1, 1]], False, [[0, 0, 0, 1, 0]]),  # whatever stands at padding
        ([[0, 1, 9, 0, 1]], [[1, 1, 0, 1, 1]], True, [[1, 0, 0, 1, 0]]),
        ([[1, 0, 1], [0, 1, 0]], [[0, 1, 1], [1, 1, 1]], torch.tensor([False, False]), [[0, 0, 0], [0, 0, 1]]),
        ([[1, 0, 1], [0, 1, 2]], [[0, 1, 1], [1, 1, 1]], torch.tensor([True, False]), [[0, 1, 0], [0, 0, 0]]),
    ],
)
def test_documents_begin_where_positions_fall(positions, mask, began, expected):
    assert opens(positions, mask, began) == expected


@pytest.mark.parametrize("positions", [[[1, 1, 0, 1]], [[0, 0, 0, 1]], [[7, 9, 0, 1]], [[0, 1, 2, 3]]])
def test_left_padding_is_no_document(positions):
    assert isinstance(layout(positions, [[0, 0, 1, 1]]), PaddedRows)


@pytest.mark.parametrize("positions", [[[0, 1, 1, 1, 2, 3]], [[0, 1, 9, 9, 2, 3]], [[0, 1, 2, 3, 4, 5]]])
def test_padding_in_the_middle_is_no_document(positions):
    assert isinstance(layout(positions, [[1, 1, 0, 0, 1, 1]]), PaddedRows)


def test_packing_and_unpacking():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, 2, 4, generator=generator)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 0, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0]]).bool()
    rows = PaddedRows.from_mask(mask)
    assert rows.lengths.tolist() == [5, 4, 0]
    packed = rows.pack(x)
    assert torch.equal(packed[0, :5], x[0, 2:]) and torch.equal(packed[1, :4], x[1, mask[1]])
    assert torch.equal(rows.unpack(packed), x * mask[..., None, None])
    opens = torch.zeros(3, 7, dtype=torch.bool)
    opens[0, 4] = opens[1, 0] = opens[1, 5] = True
    documents = PackedDocuments.from_opens(opens, mask)
    assert documents.cu_seqlens.tolist() == [0, 2, 5, 7, 9]
    assert documents.row.tolist() == [0, 0, 1, 1] and documents.last.tolist() == [1, 3, -1]
    assert documents.continues.tolist() == [True, False, False, False]
    assert torch.equal(documents.pack(x)[0], x[mask])
    assert torch.equal(documents.unpack(documents.pack(x)), x * mask[..., None, None])
    state = {"S": torch.randn(3, 5, generator=generator)}
    assert torch.equal(documents.states_in(state)["S"], torch.cat([state["S"][:1], torch.zeros(3, 5)]))
    new = {"S": torch.randn(4, 5, generator=generator)}
    assert torch.equal(documents.states_out(new, state)["S"], torch.stack([new["S"][1], new["S"][3], state["S"][2]]))
    assert torch.equal(documents.states_out(new, None)["S"][2], torch.zeros(5))


def test_cuts_and_selections():
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]]).bool()
    opens = torch.tensor([[0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1]]).bool()
    documents = PackedDocuments.from_opens(opens, mask)
    assert isinstance(documents.cut(0, 2), PaddedRows)  # a piece without a border; a row without a token
    assert documents.cut(0, 2).lengths.tolist() == [2, 0]
    assert documents.cut(2, 6).continues.tolist() == [False, True, False]
    assert documents.select(torch.tensor([1, 1])).row.tolist() == [0, 0, 1, 1]
    assert PaddedRows.from_mask(mask).select(torch.tensor([1])).lengths.tolist() == [4]
    assert PaddedRows.from_mask(mask).cut(3, 6).lengths.tolist() == [1, 3]
