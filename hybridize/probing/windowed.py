"""Makes one layer's attention see a sliding window and the first tokens only; all else stays the source's own code.

The attention module gets a copy of its config that names an attention function registered here. Projections, rotary
embedding, q/k norms and the rest of the layer never notice.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybridize.errors import ConversionError

NAME = "hybridize_window"
SINKS = 4
_SMALLEST_BLOCK, _LARGEST_BLOCK = 128, 1024  # queries that share one mask


@dataclass
class Reach:
    """What an attention module may see: `window` tokens (None: all) and the first `sinks`; `own` is what it ran before.

    `calls` counts how often the module asked for its attention here: a module that never does cannot be windowed.
    """

    window: int | None
    sinks: int
    own: str
    calls: int = 0


_reach: WeakKeyDictionary[nn.Module, Reach] = WeakKeyDictionary()


@contextmanager
def windowed(attention: nn.Module, window: int, sinks: int = SINKS) -> Iterator[Reach]:
    """Within the block, query i of this module sees keys j with i - window < j <= i, and the first `sinks` real ones.

    Only of what it sees anyway: padding and the source's own sliding window stay. A window of the whole sequence runs
    the source's own attention. Raises ValueError for a window below 1 or fewer than 0 sinks.
    """
    if window < 1 or sinks < 0:
        raise ValueError(f"window must be at least 1 and sinks at least 0, but they are {window} and {sinks}")
    with _rerouted(attention, Reach(window, sinks, _own(attention))) as reach:
        yield reach


@contextmanager
def without_masks(body: Any) -> Iterator[None]:
    """Within the block, the model makes no tokens x tokens mask: its own sliding windows are applied in blocks.

    Attention that needs such a mask (eager) runs as sdpa; sdpa's own call is unchanged where it makes no mask itself.
    """
    config = body.config
    with ExitStack() as stack:
        for layer in body.layers:
            if layer.self_attn not in _reach:  # a window set outside of this block stays
                stack.enter_context(_rerouted(layer.self_attn, Reach(None, 0, _own(layer.self_attn))))
        body.config = _renamed(config)
        try:
            yield
        finally:
            body.config = config


@contextmanager
def _rerouted(attention: Any, reach: Reach) -> Iterator[Reach]:
    config, before = attention.config, _reach.get(attention)
    attention.config = _renamed(config)
    _reach[attention] = reach
    try:
        yield reach
    finally:
        attention.config = config
        if before is None:
            del _reach[attention]
        else:
            _reach[attention] = before


def _own(attention: Any) -> str:
    if not hasattr(attention, "config"):
        raise ConversionError(f"A {type(attention).__name__} has no config: its attention cannot be windowed.")
    before = _reach.get(attention)
    return attention.config._attn_implementation or "eager" if before is None else before.own


def _renamed(config: Any) -> Any:
    renamed = copy.copy(config)
    renamed._attn_implementation = NAME
    return renamed


def window_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface: query [B,H,T,D], key and value [B,Hk,T,D] -> (output [B,T,H,D], weights).

    attention_mask: None, real tokens [B,T], or [B,1,T,T] (bool, or added to the scores).
    """
    reach = _reach[module]
    reach.calls += 1
    tokens = query.shape[2]
    if key.shape[2] != tokens:
        raise ValueError(f"{tokens} queries but {key.shape[2]} keys: windowed attention needs use_cache=False")
    window = tokens if reach.window is None else min(reach.window, tokens)
    own_window = sliding_window or getattr(module, "sliding_window", None) or tokens
    own = reach.own if "flash" in reach.own or attention_mask is not None else "sdpa"  # eager needs a mask
    knows = "flash" in own or (own_window >= tokens if attention_mask is None else attention_mask.dim() == 4)
    if window == tokens and knows:
        # Families differ in their eager function, so that each module's file has its own.
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(own, eager)
        kwargs |= {} if sliding_window is None else {"sliding_window": sliding_window}
        return attend(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return _in_blocks(query, key, value, attention_mask, scaling, window, own_window, reach.sinks), None


def _in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    window: int,
    own_window: int,
    sinks: int,
) -> Tensor:
    """Attention over blocks of queries, each with the keys it can reach: no mask is longer than a block and a window.

    chunk_swa of the kernels is not used: it copies every key window / 256 times, and knows of no arbitrary mask and of
    no second window that ends the sinks' reach.
    """
    batch, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    reach = min(window, own_window)
    size = min(max(reach, _SMALLEST_BLOCK), _LARGEST_BLOCK)
    sink = _sink_positions(mask, min(sinks, tokens), query.device)
    sink_key, sink_value = (_take(x, sink) for x in (key, value))
    outputs = []
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        first = max(0, start - reach + 1)
        i = torch.arange(start, stop, device=query.device)[:, None]
        j = torch.arange(first, stop, device=query.device)
        near = ((j <= i) & (j > i - reach)).expand(len(sink), -1, -1)
        far = (sink[:, None] <= i - window) & (sink[:, None] > i - own_window)
        visible = torch.cat([far, near], -1)[:, None]
        given = _columns(mask, start, stop, sink, first)
        if given is not None:
            visible = visible & given if given.dtype == torch.bool else given.masked_fill(~visible, float("-inf"))
        keys = torch.cat([sink_key, key[:, :, first:stop]], 2)
        values = torch.cat([sink_value, value[:, :, first:stop]], 2)
        # The query heads of a key head are rows of one attention, so that keys are never repeated.
        rows = query[:, :, start:stop].reshape(batch, kv_heads, -1, dim)
        out = F.scaled_dot_product_attention(rows, keys, values, visible.repeat(1, 1, group, 1), scale=scaling)
        outputs.append(out.reshape(batch, heads, stop - start, -1).transpose(1, 2))
    return torch.cat(outputs, 1)


def _sink_positions(mask: Tensor | None, sinks: int, device: torch.device) -> Tensor:
    """Positions of each row's first real tokens, [B,S], or [1,S] without a mask; they may run over the row's end.

    In a 4-D mask a real token is one that sees itself.
    """
    offsets = torch.arange(sinks, device=device)[None]
    if mask is None:
        return offsets
    real = mask if mask.dim() == 2 else mask[:, 0].diagonal(dim1=-2, dim2=-1)
    real = real > torch.finfo(real.dtype).min / 2 if real.is_floating_point() else real.bool()
    # The last position is never a sink that is out of the window, so it stands for those that are not there.
    return (real.int().argmax(-1, keepdim=True) + offsets).clamp(max=real.shape[-1] - 1)


def _take(x: Tensor, positions: Tensor) -> Tensor:
    """x [B,H,T,D] at positions [B or 1,S] -> [B,H,S,D]."""
    return x.gather(2, positions[:, None, :, None].expand(x.shape[0], x.shape[1], -1, x.shape[3]))


def _columns(mask: Tensor | None, start: int, stop: int, sink: Tensor, first: int) -> Tensor | None:
    """What the given mask says of queries start..stop and the sinks followed by keys first..stop, [B,1,n,S+m]."""
    if mask is None:
        return None
    rows = mask.bool()[:, None, None].expand(-1, 1, stop - start, -1) if mask.dim() == 2 else mask[:, :, start:stop]
    at = sink[:, None, None].expand(-1, 1, stop - start, -1)
    return torch.cat([rows.gather(-1, at), rows[..., first:stop]], -1)


ALL_ATTENTION_FUNCTIONS.register(NAME, window_attention)
# Flash attention takes a mask of real tokens, or none when all are: what is wanted here too.
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, flash_attention_mask)
