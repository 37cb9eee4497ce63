"""Singular values of many matrices at once, exact or estimated, and how many of them matter.

A spectrum is a pair (values, weights), both fp64 [N, m]: weights are 1 where the values are the singular values
themselves; in an estimate some values stand for `weight` singular values near them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Spectrum = tuple[Tensor, Tensor]
SPECTRUM_STATISTICS = (
    "rank",
    "relative_rank",
    "energy_90",
    "energy_99",
    "entropy",
    "nuclear",
    "stable",
    "tail",
    "tail_norm",
)
EXACT_LIMIT = 512  # a smaller side up to this is decomposed exactly unless told otherwise


@dataclass(frozen=True)
class Estimate:
    """Size of an estimate: singular values found one by one, then random probes and Lanczos steps for the rest.

    `passes` are power iterations. With these sizes, every statistic's mean over a layer's heads came within 2.5 % of
    the exact one for all layers of SmolLM2-135M at 1024 tokens.
    """

    basis: int = 128
    probes: int = 16
    steps: int = 16
    passes: int = 2


def exact_spectrum(matrices: Tensor) -> Spectrum:
    """All singular values of [N, R, C] by the eigenvalues of the smaller Gram matrix in fp64.

    Values below about 1e-8 of the largest are noise: squaring costs half of the digits.
    """
    tall = _tall(matrices).to(_double_device(matrices)).double()
    values = torch.linalg.eigvalsh(tall.mT @ tall).clamp(min=0).sqrt()
    return values, torch.ones_like(values)


def estimated_spectrum(matrices: Tensor, generator: torch.Generator, size: Estimate) -> Spectrum:
    """The largest singular values of [N, R, C] and a quadrature for the rest, from products with the matrices alone.

    A randomised range finder (Halko, Martinsson and Tropp 2011, algorithm 4.4) gives an orthonormal basis Q and the
    values of A Q. What A does beyond Q is measured by Golub-Kahan-Lanczos quadrature from random vectors orthogonal
    to Q (stochastic Lanczos quadrature; deflation as in Hutch++, arXiv 2010.09649).
    """
    a = _tall(matrices)
    count, _, columns = a.shape
    q = torch.randn(count, columns, min(size.basis, columns), generator=generator, device=a.device, dtype=a.dtype)
    for _ in range(size.passes):
        q = torch.linalg.qr(a.mT @ (a @ q)).Q
    image = a @ q
    values, weights = exact_spectrum(image)
    if q.shape[-1] == columns:
        return values, weights
    start = torch.randn(count, columns, size.probes, generator=generator, device=a.device, dtype=a.dtype)
    start = _orthogonal(_orthogonal(start, q), q)
    norms = start.norm(dim=-2)
    nodes, shares = _lanczos(a, q, image, start / norms[:, None], min(size.steps, columns - q.shape[-1]))
    shares = shares * (norms.to(shares).square() / size.probes)[..., None]
    return torch.cat([values, nodes.flatten(1)], -1), torch.cat([weights, shares.flatten(1)], -1)


def _lanczos(a: Tensor, q: Tensor, image: Tensor, v: Tensor, steps: int) -> Spectrum:
    """Nodes and shares, [N, probes, steps], of the singular values of a (I - q q^T) as each unit vector of v sees them.

    Bidiagonalisation of a itself and not of its Gram matrix, so that small values keep their digits beside large ones.
    """
    seen: list[Tensor] = []
    diagonal: list[Tensor] = []
    above: list[Tensor] = []
    left = torch.zeros_like(a[..., :1])
    beta = torch.zeros_like(v[:, :1])
    largest = torch.zeros_like(v[:, :1, :1])
    for _ in range(steps):
        seen.append(v)
        left = a @ v - image @ (q.mT @ v) - beta * left
        alpha = left.norm(dim=-2, keepdim=True)
        largest = torch.maximum(largest, alpha.amax(-1, keepdim=True))
        left, alpha = _unit(left, alpha, largest)
        v = a.mT @ left - alpha * v
        past = torch.stack(seen, -1)
        for _ in range(2):
            v = _orthogonal(v, q)
            v = v - torch.einsum("ncpj,npj->ncp", past, torch.einsum("ncpj,ncp->npj", past, v))
        beta = v.norm(dim=-2, keepdim=True)
        v, beta = _unit(v, beta, largest)
        diagonal.append(alpha[:, 0])
        above.append(beta[:, 0])
    device = _double_device(a)
    d, e = (torch.stack(parts, -1).to(device).double() for parts in (diagonal, above[:-1] or [above[0][..., :0]]))
    bidiagonal = torch.diag_embed(d)
    if steps > 1:
        bidiagonal = bidiagonal + torch.diag_embed(e, 1)
    squares, vectors = torch.linalg.eigh(bidiagonal.mT @ bidiagonal)
    return squares.clamp(min=0).sqrt(), vectors[..., 0, :].square()


def _unit(x: Tensor, norm: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """x / norm and norm, or zeros where nothing but rounding is left: there the Krylov space is exhausted."""
    empty = norm <= 1e-6 * largest
    return torch.where(empty, 0.0, x / norm.clamp(min=1e-30)), torch.where(empty, 0.0, norm)


def _orthogonal(x: Tensor, q: Tensor) -> Tensor:
    return x - q @ (q.mT @ x)


def _tall(matrices: Tensor) -> Tensor:
    return matrices.mT if matrices.shape[-2] < matrices.shape[-1] else matrices


def _double_device(matrices: Tensor) -> torch.device:
    # Apple's GPUs have no fp64.
    return torch.device("cpu") if matrices.device.type == "mps" else matrices.device


def spectrum_statistics(spectrum: Spectrum, *, absolute: float, relative: float, state: int) -> dict[str, Tensor]:
    """Statistics of N spectra, each fp64 [N]; a zero matrix has 0 everywhere.

    rank: singular values above `absolute`; relative_rank: above `relative` times the largest; energy_90, energy_99: the
    fewest that hold this share of the squares; entropy: exp of the entropy of values / their sum (arXiv 2504.19561);
    nuclear: their sum; stable: sum of squares / largest square; tail, tail_norm: root of the squares beyond the
    `state` largest, as a share of all and itself (no state of that size comes closer: Eckart and Young).
    """
    values, order = spectrum[0].sort(-1, descending=True)
    weights = spectrum[1].gather(-1, order)
    largest = values[:, :1]
    energy = weights * values.square()
    total, nuclear = energy.sum(-1), (weights * values).sum(-1)
    share = values / _positive(nuclear)[:, None]
    before = weights.cumsum(-1) - weights
    inside = (state - before).clamp(min=0).minimum(weights)
    tail = ((weights - inside) * values.square()).sum(-1).sqrt()
    some = (total > 0).double()
    return {
        "rank": (weights * (values > absolute)).sum(-1),
        "relative_rank": (weights * (values > relative * largest)).sum(-1),
        "energy_90": _energy_rank(energy, weights, before, 0.90),
        "energy_99": _energy_rank(energy, weights, before, 0.99),
        "entropy": some * (-weights * share * share.clamp(min=1e-300).log()).sum(-1).exp(),
        "nuclear": nuclear,
        "stable": total / _positive(largest[:, 0].square()),
        "tail": tail / _positive(total).sqrt(),
        "tail_norm": tail,
    }


def _energy_rank(energy: Tensor, weights: Tensor, before: Tensor, share: float) -> Tensor:
    total = energy.sum(-1, keepdim=True)
    sums = energy.cumsum(-1)
    at = (sums < share * total).sum(-1, keepdim=True).clamp(max=energy.shape[-1] - 1)
    missing = share * total - (sums - energy).gather(-1, at)
    part = missing / _positive(energy.gather(-1, at))
    # 1e-9: a sum that meets the share exactly may miss it by its rounding.
    return (before.gather(-1, at) + part * weights.gather(-1, at) - 1e-9).ceil().clamp(min=0)[:, 0]


def _positive(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 1.0)
