"""Gated DeltaNet: a decaying state corrected towards each new value."""

from hybridize.kernels.gdn.chunk import chunk_gated_delta_rule
from hybridize.kernels.gdn.naive import naive_gated_delta_rule
from hybridize.kernels.gdn.recurrent import recurrent_gated_delta_rule

__all__ = ["chunk_gated_delta_rule", "naive_gated_delta_rule", "recurrent_gated_delta_rule"]
