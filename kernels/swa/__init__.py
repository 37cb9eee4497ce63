"""Sliding-window attention with optional sink tokens."""

from hybridize.kernels.swa.chunk import chunk_swa
from hybridize.kernels.swa.naive import naive_swa
from hybridize.kernels.swa.state import SlidingState

__all__ = ["SlidingState", "chunk_swa", "naive_swa"]
