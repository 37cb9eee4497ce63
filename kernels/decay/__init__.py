"""Linear attention with a scalar decay per head, in chunks: the core that gka, gdn and ssd share."""

from hybridize.kernels.decay.chunk import decay_factors, grouped_matmul, read_out, scan_states, written_states

__all__ = ["decay_factors", "grouped_matmul", "read_out", "scan_states", "written_states"]
