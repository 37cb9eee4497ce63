"""Layouts for batches and for packed sequences (cu_seqlens)."""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def sequence_bounds(x: Tensor, cu_seqlens: Tensor | None) -> list[int] | None:
    """Return cu_seqlens as a checked list of N + 1 offsets into x [1,T,...]; ValueError when they do not fit."""
    if cu_seqlens is None:
        return None
    bounds = [int(b) for b in cu_seqlens.tolist()]
    if x.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs a batch of 1, but the batch is {x.shape[0]}")
    if not bounds or bounds[0] != 0 or bounds[-1] != x.shape[1] or bounds != sorted(bounds):
        raise ValueError(f"cu_seqlens must rise from 0 to the {x.shape[1]} tokens given, but is {bounds}")
    return bounds


class PaddedLayout:
    """Packed sequences as rows of one batch padded with zeros at the end; a plain batch stays as it is."""

    def __init__(self, x: Tensor, cu_seqlens: Tensor | None):
        bounds = sequence_bounds(x, cu_seqlens)
        self.sequences = x.shape[0] if bounds is None else len(bounds) - 1
        self.lengths = None if bounds is None else [b - a for a, b in pairwise(bounds)]

    def pack(self, x: Tensor) -> Tensor:
        """Turn [1,T,...] into [N,longest,...]."""
        if self.lengths is None:
            return x
        if not self.lengths:
            return x.new_zeros(0, 0, *x.shape[2:])
        return torch.nn.utils.rnn.pad_sequence(list(x[0].split(self.lengths)), batch_first=True)

    def unpack(self, x: Tensor) -> Tensor:
        """Turn [N,longest,...] back into [1,T,...]."""
        if self.lengths is None:
            return x
        if not self.lengths:
            return x.new_zeros(1, 0, *x.shape[2:])
        return torch.cat([row[:n] for row, n in zip(x, self.lengths, strict=True)])[None]


class ChunkLayout:
    """Tokens cut into chunks that never cross a sequence border.

    Chunks lie in the order of processing: the first chunk of every sequence, then the second of those that have one,
    and so on, longest first. So step j of a pass over the states works on counts[j] consecutive chunks and on the
    first counts[j] states, and memory is linear in the number of tokens however unequal the sequences are.
    """

    def __init__(self, x: Tensor, chunk: int, cu_seqlens: Tensor | None):
        self.batch, self.tokens = x.shape[:2]
        self.chunk = chunk
        bounds = sequence_bounds(x, cu_seqlens)
        if bounds is None:
            self.sequences = self.batch
            self.counts = [self.batch] * -(-self.tokens // chunk)
            self.order: Tensor | None = None
            return
        starts = torch.tensor(bounds[:-1], dtype=torch.int64)
        lengths = torch.tensor(bounds[1:], dtype=torch.int64) - starts
        self.sequences = len(lengths)
        order = torch.argsort(lengths, descending=True, stable=True)
        chunks = (lengths[order] + chunk - 1) // chunk
        steps = int(chunks.max()) if self.sequences else 0
        active = chunks[None, :] > torch.arange(steps)[:, None]
        self.counts = active.sum(1).tolist()
        step, rank = active.nonzero(as_tuple=True)
        offset = step[:, None] * chunk + torch.arange(chunk)
        source = torch.where(offset < lengths[order][rank, None], starts[order][rank, None] + offset, self.tokens)
        target = torch.empty(self.tokens + 1, dtype=torch.int64)
        target[source.flatten()] = torch.arange(source.numel())
        self.order = order.to(x.device)
        self.inverse = torch.argsort(order).to(x.device)
        self.source = source.flatten().to(x.device)  # padding reads row T, which pack appends
        self.target = target[:-1].to(x.device)

    def pack(self, x: Tensor) -> Tensor:
        """Turn [B,T,H,...] into contiguous chunks [M,H,C,...], padded with zeros."""
        if self.order is None:
            missing = len(self.counts) * self.chunk - self.tokens
            if missing:
                x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
            x = x.reshape(self.batch, len(self.counts), self.chunk, *x.shape[2:]).transpose(0, 1)
            return x.transpose(2, 3).reshape(sum(self.counts), x.shape[3], self.chunk, *x.shape[4:]).contiguous()
        x = torch.cat([x[0], x.new_zeros(1, *x.shape[2:])]).index_select(0, self.source)
        return x.reshape(sum(self.counts), self.chunk, *x.shape[1:]).transpose(1, 2).contiguous()

    def unpack(self, x: Tensor) -> Tensor:
        """Turn chunks [M,H,C,D] back into [B,T,H,D]."""
        if self.order is None:
            x = x.reshape(len(self.counts), self.batch, *x.shape[1:]).permute(1, 0, 3, 2, 4)
            return x.reshape(self.batch, len(self.counts) * self.chunk, *x.shape[3:])[:, : self.tokens]
        x = x.transpose(1, 2)
        return x.reshape(x.shape[0] * self.chunk, *x.shape[2:]).index_select(0, self.target)[None]

    def sort(self, state: Tensor) -> Tensor:
        """Bring states [N,...] into the order of processing."""
        return state if self.order is None else state.index_select(0, self.order)

    def unsort(self, state: Tensor) -> Tensor:
        """Bring states back into the caller's order."""
        return state if self.order is None else state.index_select(0, self.inverse)


class ChunkTable(NamedTuple):
    """Where the chunks of [B,T,...] lie once its tokens are taken as one row of B*T; the Triton kernels read it.

    Sequence n has the tokens from seq_start[n] to seq_start[n + 1] and the chunks from chunk_start[n] to
    chunk_start[n + 1]; chunk c belongs to sequence chunk_seq[c]. A sequence without tokens has no chunk.
    """

    sequences: int
    chunks: int
    seq_start: Tensor  # int64 [N + 1]
    chunk_start: Tensor  # int32 [N + 1]
    chunk_seq: Tensor  # int32 [chunks]
    bounds: tuple[int, ...]  # chunk_start, on the host


def chunk_table(x: Tensor, chunk: int, cu_seqlens: Tensor | None) -> ChunkTable:
    """Return the table of x [B,T,...] cut into chunks that never cross a sequence border."""
    bounds = sequence_bounds(x, cu_seqlens)
    if bounds is None:
        bounds = [n * x.shape[1] for n in range(x.shape[0] + 1)]
    return _chunk_table(tuple(bounds), chunk, x.device)


@lru_cache(maxsize=64)  # all layers of a model ask for the same one
def _chunk_table(bounds: tuple[int, ...], chunk: int, device: torch.device) -> ChunkTable:
    seq_start = torch.tensor(bounds, dtype=torch.int64)
    chunks = (seq_start.diff() + chunk - 1) // chunk
    chunk_start = F.pad(chunks.cumsum(0), (1, 0)).to(torch.int32)
    chunk_seq = torch.repeat_interleave(torch.arange(len(chunks), dtype=torch.int32), chunks)
    starts = tuple(chunk_start.tolist())
    return ChunkTable(
        len(chunks), len(chunk_seq), seq_start.to(device), chunk_start.to(device), chunk_seq.to(device), starts
    )


class SegmentTable(NamedTuple):
    """Sequences cut into segments of whole chunks, for kernels that carry a state through one segment each.

    Segment s has the chunks from segment_start[s] to segment_start[s + 1] of sequence segment_seq[s]; sequence n has
    the segments from seq_segment[n] to seq_segment[n + 1]: at least one, without chunks when it has no tokens.
    """

    segments: int
    segment_start: Tensor  # int32 [segments + 1]
    segment_seq: Tensor  # int32 [segments]
    seq_segment: Tensor  # int32 [N + 1]
    followed: Tensor  # int32 [segments - N], the segments that another one of their sequence follows


def segment_table(table: ChunkTable, length: int) -> SegmentTable:
    """Return the table of segments of about so many chunks, equal ones in each sequence."""
    return _segment_table(table.bounds, length, table.chunk_start.device)


@lru_cache(maxsize=64)
def _segment_table(bounds: tuple[int, ...], length: int, device: torch.device) -> SegmentTable:
    starts, sequences, seq_segment = [], [], [0]
    for n, (first, end) in enumerate(pairwise(bounds)):
        parts = max(1, (end - first + length // 2) // length)
        starts += [first + (end - first) * i // parts for i in range(parts)]
        sequences += [n] * parts
        seq_segment.append(len(starts))
    followed = [s for s, (n, after) in enumerate(pairwise(sequences)) if n == after]
    lists = ([*starts, bounds[-1]], sequences, seq_segment, followed)
    return SegmentTable(len(starts), *(torch.tensor(x, dtype=torch.int32).to(device) for x in lists))
