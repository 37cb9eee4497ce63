"""Short causal depthwise convolution over a batch or packed sequences."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridize.kernels.common import compute_dtype
from hybridize.kernels.varlen import sequence_bounds


def start_tail(initial: Tensor | None, rows: int, width: int, x: Tensor) -> Tensor:
    """Return the last inputs before x, [rows, width - 1, C] in x's dtype: zeros when none are given."""
    shape = (rows, width - 1, x.shape[-1])
    if initial is None:
        return x.new_zeros(shape)
    if tuple(initial.shape) != shape:
        raise ValueError(f"initial_state has shape {tuple(initial.shape)}, expected {shape}")
    return initial.to(x.dtype)


def convolve(x: Tensor, tokens: int, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Return y [B,tokens,C] of x [B,tokens + W - 1,C]; a sum of W shifts, which needs no transposed copy."""
    dtype = compute_dtype(x)
    weight = weight.to(dtype)
    y = x[:, :tokens].to(dtype) * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        y = torch.addcmul(y, x[:, tap : tap + tokens].to(dtype), weight[:, tap])
    if bias is not None:
        y = y + bias.to(dtype)
    return (F.silu(y) if activation == "silu" else y).to(x.dtype)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return (y [B,T,C], the last W-1 inputs [B,W-1,C]); weight [C,W], whose last tap meets the current token.

    lengths [B] says how many tokens at the front of each row are real: the state is the tail of those.
    """
    if weight.ndim != 2 or weight.shape[0] != x.shape[-1] or activation not in (None, "silu"):
        raise ValueError(f"cannot convolve {tuple(x.shape)} by {tuple(weight.shape)} with activation {activation}")
    bounds = sequence_bounds(x, cu_seqlens)
    if bounds is not None and lengths is not None:
        raise ValueError("give lengths or cu_seqlens, not both")
    tokens, keep = x.shape[1], weight.shape[1] - 1
    if bounds is None:
        extended = torch.cat([start_tail(initial_state, x.shape[0], keep + 1, x), x], 1)
        y = convolve(extended, tokens, weight, bias, activation)
        if not output_final_state:
            return y, None
        if lengths is None:
            return y, extended[:, tokens:].clone()
        at = lengths.to(x.device)[:, None] + torch.arange(keep, device=x.device)
        return y, extended.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))
    # Every sequence is preceded by its own tail in one flat row; the first W-1 outputs of each are not wanted.
    tails = start_tail(initial_state, len(bounds) - 1, keep + 1, x)
    pairs = list(pairwise(bounds))
    pieces = [part for tail, (a, b) in zip(tails, pairs, strict=True) for part in (tail, x[0, a:b])]
    if not pieces:
        return x.clone(), tails if output_final_state else None
    extended = torch.cat(pieces)
    starts = torch.tensor([a for a, _ in pairs], device=x.device)
    sizes = torch.tensor([b - a for a, b in pairs], device=x.device)
    shift = torch.arange(len(pairs), device=x.device) * keep
    at = torch.arange(tokens, device=x.device) + shift.repeat_interleave(sizes)
    y = convolve(extended[None], extended.shape[0] - keep, weight, bias, activation).index_select(1, at)
    if not output_final_state:
        return y, None
    ends = (starts + shift + sizes)[:, None] + torch.arange(keep, device=x.device)
    return y, extended[ends]
