"""Short causal depthwise convolution."""

from hybridize.kernels.short_conv.conv import short_conv

__all__ = ["short_conv"]
