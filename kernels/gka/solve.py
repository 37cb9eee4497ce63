"""The Chebyshev solve of all tokens of a chunk at once, with implicit differentiation.

Shapes as in hybridize.kernels.decay; H_t = d_t H_0 + sum_i E_ti k_i k_i^T is never formed. Formulas: arXiv 2511.21016.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridize.kernels.decay.chunk import by_group, grouped_matmul
from hybridize.kernels.gka.inputs import chebyshev_weights, smallest_norm

CPU_BLOCK = 36  # chunk-heads whose iterates stay in the cache together
GPU_BLOCK = 8192  # chunk-heads per block elsewhere: bounds the working memory


def gram_norms(k: Tensor, e: Tensor, d: Tensor, h0: Tensor) -> Tensor:
    """Return ||H_t||_F [M,H,C]; every term is non-negative, and rows are scaled so that no square underflows."""
    size = h0.detach().abs().amax((-2, -1))
    size = torch.where(size > 0, size, 1.0)[..., None]
    lengths = by_group(e.detach(), k.shape[1]) * k.detach().square().sum(-1)[:, :, None, None]
    largest = torch.maximum(d.detach() * size, lengths.flatten(1, 2).amax(-1))
    row = torch.where(largest > 0, largest, 1.0)
    h0, e, d = h0 / size[..., None], e / row[..., None], d * size / row
    keys = k[:, :, None]
    quadratic = (torch.matmul(keys, by_group(h0, k.shape[1])) * keys).sum(-1).flatten(1, 2)
    squares = torch.matmul(k, k.transpose(-1, -2)).square()
    total = d.square() * h0.square().sum((-2, -1))[..., None]
    total = total + 2 * d * torch.matmul(e, quadratic[..., None])[..., 0]
    total = (total + (grouped_matmul(e, squares) * e).sum(-1)).clamp_min(0)
    return row * torch.where(total > 0, total, 1.0).sqrt() * (total > 0)


def inverse_norms(norms: Tensor) -> Tensor:
    """Return 1/norm, and 0 where the Gram matrix counts as zero."""
    usable = norms > smallest_norm(norms.dtype)
    return torch.where(usable, 1 / torch.where(usable, norms, 1.0), 0.0)


def blocks(x: Tensor) -> list[slice]:
    """Cut the chunks of x [M,H,...] into blocks."""
    rows = max(1, (CPU_BLOCK if x.device.type == "cpu" else GPU_BLOCK) // x.shape[1])
    return [slice(at, at + rows) for at in range(0, x.shape[0], rows)]


def chebyshev(q: Tensor, k: Tensor, e: Tensor, d: Tensor, h0: Tensor, inverse: Tensor, ridge: float, n: int) -> Tensor:
    """Return x with (H_t + ridge ||H_t|| I) x_t = q_t after n iterations, without autograd."""
    step, weights = chebyshev_weights(ridge, n)
    out = torch.empty_like(q)
    heads, chunk, dim = q.shape[1:]
    for b in blocks(q):
        # The system divided by its norm has constant weights; the step and its sign go into the factors.
        factor = -step * inverse[b]
        row = (d[b] * factor)[..., None].flatten(0, 1)
        inside = (e[b] * factor[..., None]).reshape(-1, heads // k.shape[1] * chunk, chunk)
        keys = k[b].flatten(0, 1)
        transposed = keys.transpose(-1, -2).contiguous()
        start = h0[b].flatten(0, 1).transpose(-1, -2).contiguous()
        rhs = step * q[b].contiguous().flatten(0, 1)
        x, before = rhs.clone(), torch.zeros_like(rhs)
        target, scores = torch.empty_like(rhs), torch.empty_like(inside)
        grouped = target.view(inside.shape[0], -1, dim)
        for omega in weights:
            torch.bmm(x, start, out=target)
            torch.addcmul(rhs, target, row, out=target)
            torch.bmm(x.view_as(grouped), transposed, out=scores)
            scores.mul_(inside)
            grouped.baddbmm_(scores, keys)
            target.add_(x, alpha=1 - step * ridge)
            torch.lerp(before, target, omega, out=before)
            x, before = before, x
        torch.mul(x.view_as(out[b]), inverse[b][..., None], out=out[b])
    return out


def coupling(z: Tensor, x: Tensor, k: Tensor, e: Tensor, d: Tensor, h0: Tensor, *, ridge: float) -> Tensor:
    """Return sum_t z_t.(H_t + ridge ||H_t|| I) x_t, differentiable in k, e, d and h0."""
    keys = k.transpose(-1, -2)
    inside = (grouped_matmul(z, keys) * grouped_matmul(x, keys) * e).sum()
    before = (torch.matmul(d[..., None] * z, h0) * x).sum()
    return inside + before + ridge * ((z * x).sum(-1) * gram_norms(k, e, d, h0)).sum()


class _Solve(torch.autograd.Function):
    """x = (H_t + ridge ||H_t|| I)^-1 q; backward solves for z and differentiates -z.(H x) at fixed z and x."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, e: Tensor, d: Tensor, h0: Tensor, ridge: float, n: int) -> Tensor:
        inverse = torch.empty_like(d)
        for b in blocks(q):
            inverse[b] = inverse_norms(gram_norms(k[b], e[b], d[b], h0[b]))
        x = chebyshev(q, k, e, d, h0, inverse, ridge, n)
        ctx.save_for_backward(x, k, e, d, h0, inverse)
        ctx.ridge, ctx.num_iters = ridge, n
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_x.device.type, enabled=False):
            return _Solve.gradients(ctx, d_x)

    @staticmethod
    def gradients(ctx: Any, d_x: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all inputs."""
        x, k, e, d, h0, inverse = ctx.saved_tensors
        system = (k, e, d, h0)
        z = chebyshev(d_x, k, e, d, h0, inverse, ctx.ridge, ctx.num_iters)
        if not any(ctx.needs_input_grad[1:5]):
            return z, None, None, None, None, None, None
        grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in system]
        for b in blocks(x):
            with torch.enable_grad():
                leaves = [t[b].detach().requires_grad_() for t in system]
                phi = -coupling(z[b], x[b], *leaves, ridge=ctx.ridge)
            for grad, part in zip(grads, torch.autograd.grad(phi, leaves), strict=True):
                grad[b] = part
        return z, *grads, None, None


def solve(q: Tensor, k: Tensor, e: Tensor, d: Tensor, h0: Tensor, ridge: float, num_iters: int) -> Tensor:
    """Return x [M,H,C,D] for queries q, keys k, factors e and d and start states h0 [M,H,D,D]."""
    return _Solve.apply(q, k, e, d, h0, ridge, num_iters)
