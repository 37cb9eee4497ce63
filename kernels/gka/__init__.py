"""Gated KalmaNet: a gated ridge regression of values on keys, solved for each query by Chebyshev iteration."""

from hybridize.kernels.gka.chunk import chunk_gka
from hybridize.kernels.gka.naive import naive_gka
from hybridize.kernels.gka.recurrent import recurrent_gka

__all__ = ["chunk_gka", "naive_gka", "recurrent_gka"]
