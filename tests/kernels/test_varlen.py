"""Layouts of packed sequences."""

import pytest
import torch

from hybridize.kernels.varlen import ChunkLayout, PaddedLayout, chunk_table, segment_table

LENGTHS = [[1000] + [1] * 50, [0, 5, 64, 65, 0], [0], [], [3]]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_chunks_hold_every_token_once(lengths):
    tokens = sum(lengths)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    x = torch.arange(1, tokens + 1, dtype=torch.float64).reshape(1, -1, 1, 1)
    layout = ChunkLayout(x, 64, bounds)
    packed = layout.pack(x)
    # Linear in the tokens, whatever their distribution: no sequence is padded to the longest.
    assert packed.shape == (sum(-(-n // 64) for n in lengths), 1, 64, 1)
    assert torch.equal(layout.unpack(packed), x)
    assert packed.sum() == x.sum()
    assert layout.counts == sorted(layout.counts, reverse=True)
    states = torch.arange(len(lengths))
    assert torch.equal(layout.unsort(layout.sort(states)), states)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_padding_is_undone(lengths):
    x = torch.randn(1, sum(lengths), 2)
    layout = PaddedLayout(x, torch.tensor([0, *lengths]).cumsum(0))
    assert torch.equal(layout.unpack(layout.pack(x)), x)


def test_a_batch_is_cut_at_the_same_places():
    x = torch.arange(2 * 130.0).reshape(2, 130, 1)
    layout = ChunkLayout(x, 64, None)
    packed = layout.pack(x)
    assert layout.counts == [2, 2, 2] and packed.shape == (6, 1, 64) and packed.is_contiguous()
    assert torch.equal(packed[2, 0], x[0, 64:128, 0]) and packed[4, 0, 2:].eq(0).all()
    assert torch.equal(layout.unpack(packed[..., None])[..., 0], x)


@pytest.mark.parametrize("lengths", [[1000] + [1] * 50, [0, 5, 64, 65, 0], [0], [640, 640, 640]])
@pytest.mark.parametrize("length", [1, 3, 100])
def test_segments_hold_every_chunk_once(lengths, length):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    table = chunk_table(torch.zeros(1, sum(lengths), 1), 64, bounds)
    segments = segment_table(table, length)
    assert len(segments.segment_seq) == segments.segments and segments.segment_start[-1] == table.chunks
    for n in range(len(lengths)):
        mine = range(int(segments.seq_segment[n]), int(segments.seq_segment[n + 1]))
        sizes = [int(segments.segment_start[s + 1] - segments.segment_start[s]) for s in mine]
        chunks = -(-lengths[n] // 64)
        assert sum(sizes) == chunks and max(sizes) - min(sizes) <= 1 and max(sizes) < 1.5 * length + 1
        assert all(segments.segment_seq[s] == n for s in mine)
        assert [int(s) for s in segments.followed if s in mine] == list(mine)[:-1]
