"""State-space duality: the sequence mixer of Mamba-2."""

from hybridize.kernels.ssd.chunk import chunk_ssd
from hybridize.kernels.ssd.naive import naive_ssd
from hybridize.kernels.ssd.recurrent import recurrent_ssd

__all__ = ["chunk_ssd", "naive_ssd", "recurrent_ssd"]
