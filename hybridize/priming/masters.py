"""What the optimiser works on: trained parameters in fp32, beside the copy in a smaller format that computes.

Computing on a bf16 copy, rather than under autocast: frozen parameters, most of the model in stage align, then take two
bytes instead of four and are not cast anew in every forward; activations take half the memory too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hybridize.mixers.base import Mixer


class Masters:
    """fp32 copies of the trained parameters of a model whose other parameters are frozen; by name, in model order.

    With dtype fp32 the parameters themselves are the masters. Otherwise the model (and its teacher, which may share
    tensors with it) is put into `dtype` until `restore`; decays stay in fp32.
    """

    def __init__(self, model: Any, trained: dict[str, nn.Parameter], dtype: torch.dtype, teacher: Any = None):
        model.requires_grad_(False)
        for p in trained.values():
            p.requires_grad_(True)
        self.trained = trained
        self.masters: dict[str, Tensor] = dict(trained)
        self._frozen: list[tuple[nn.Parameter, Tensor | None]] = []  # and on the CPU what `dtype` cannot hold exactly
        self.separate = dtype != torch.float32
        if not self.separate:
            return
        self.masters = {name: nn.Parameter(p.detach().to(torch.float32, copy=True)) for name, p in trained.items()}
        own = {id(p) for p in trained.values()}
        everything = [*model.named_parameters(), *([] if teacher is None else teacher.named_parameters())]
        for name, p in {id(p): (name, p) for name, p in everything}.values():
            if name.rsplit(".", 1)[-1] in Mixer.fp32_names:
                continue
            small = p.detach().to(dtype)
            if id(p) not in own:
                exact = torch.equal(small.to(p.dtype), p.detach())
                self._frozen.append((p, None if exact else p.detach().cpu()))
            # Not model.to(): that would round buffers, such as the rotary frequencies, too.
            p.data = small

    def collect(self) -> None:
        """Add the gradients of the last backward to the masters', in fp32, and clear them."""
        if self.separate:
            for name, p in self.trained.items():
                if p.grad is not None:
                    master = self.masters[name]
                    master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
                    p.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters that compute."""
        if self.separate:
            for name, p in self.trained.items():
                p.copy_(self.masters[name])

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Take over saved masters; the names must be the same."""
        for name, master in self.masters.items():
            master.copy_(weights[name])
        self.publish()

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back into fp32: trained parameters from the masters, frozen ones as they were."""
        for name, p in self.trained.items():
            p.data = self.masters[name].detach()
        for p, exact in self._frozen:
            p.data = (p.detach() if exact is None else exact).to(p.device, torch.float32)
