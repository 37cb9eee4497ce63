"""Attention masks that transformers would not make by itself for the unconverted layers.

Packed documents: transformers finds them only where there is neither a mask nor a cache; a hybrid's state never leaks
across documents, so its attention layers must not either. Static caches: a single token needs a mask to keep it from
the slots that are still empty, and transformers leaves it out unless all layers of the cache are static.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_masks_for_generate

from hybridize.errors import ConversionError
from hybridize.mixers.tokens import PackedDocuments, TokenLayout


def attention_masks(
    config: Any,
    inputs: Tensor,
    dtype: torch.dtype,
    kwargs: dict[str, Any],
    cache: Any,
    layout: TokenLayout | None,
    past: int,
    keeper: Any,
    cache_name: str,
) -> Any:
    """Masks for the attention layers, or None where the source's own are right.

    `keeper` is the cache layer that remembers where each row's current document begins.
    """
    remembered = None if keeper is None else keeper.document_start
    packed = isinstance(layout, PackedDocuments)
    documents = packed or remembered is not None
    batch, length = inputs.shape[:2]
    static = length == 1 and cache is not None and any(layer.is_compileable for layer in cache.layers)
    if not documents and not static:
        return None
    start = torch.zeros(batch, 1, dtype=torch.long, device=inputs.device)
    if remembered is not None:
        start = remembered[:, None].to(inputs.device)
    if packed:
        opens = layout.opens.to(inputs.device)  # type: ignore[union-attr]
        at = past + torch.arange(length, device=inputs.device)
        start = torch.where(opens, at, start).cummax(dim=1).values
    else:
        start = start.expand(-1, length)
    if keeper is not None and documents:
        keeper.document_start = start[:, -1].clone()
    if "flash" in config._attn_implementation:
        if not documents:
            return None
        if remembered is not None or batch > 1 or (packed and not layout.mask.all()):  # type: ignore[union-attr]
            raise ConversionError(
                "Packed documents with flash attention need one row, no padding and a single forward; "
                "load the model with attn_implementation='sdpa'."
            )
        kwargs["attention_mask"] = None  # flash attention finds the borders in position_ids
        return None

    def same_document(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key >= start[row, query - past]

    embeds = torch.empty(batch, length, 0, dtype=dtype, device=inputs.device)
    return create_masks_for_generate(
        config=config,
        inputs_embeds=embeds,
        attention_mask=kwargs.get("attention_mask"),
        position_ids=None,
        and_mask_function=same_document,
        **{cache_name: cache},
    )
