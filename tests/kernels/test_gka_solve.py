"""The Chebyshev solve of gka against a direct solve, and where it is hardest."""

import pytest
import torch
from kernel_cases import call, cast, error, make_inputs, make_state

from hybridize.kernels.gka import chunk_gka, naive_gka, recurrent_gka


def direct(q, k, g, beta, ridge, h):
    """Return (H_t + ridge ||H_t|| I)^-1 q_t for unit q by torch.linalg.solve, [B,T,H,D]."""
    heads, dim = q.shape[2:]
    q, k = q / (q.norm(dim=-1, keepdim=True) + 1e-6), k / (k.norm(dim=-1, keepdim=True) + 1e-6)
    k = k.repeat_interleave(heads // k.shape[2], 2) * (beta[..., None] + 1e-6)
    found = []
    for t in range(q.shape[1]):
        h = g[:, t, :, None, None].exp() * h + k[:, t, :, :, None] * k[:, t, :, None, :]
        norm = torch.linalg.matrix_norm(h)[..., None, None]
        found.append(torch.linalg.solve(h + ridge * norm * torch.eye(dim, dtype=h.dtype), q[:, t]))
    return torch.stack(found, 1)


@pytest.mark.parametrize("ridge", [0.02, 0.1])
@pytest.mark.parametrize("num_iters", [1, 5, 10, 30, 60])
def test_within_the_chebyshev_bound_of_a_direct_solve(ridge, num_iters):
    """Zero values and U = I make the output the solution itself, as long as nothing decays U."""
    inputs, (h, _) = make_inputs("gka", 2, 70, gate="zero"), make_state("gka", 2)
    inputs["alpha"] = torch.ones_like(inputs["alpha"])
    inputs["v"] = torch.zeros(2, 70, 2, 8, dtype=torch.float64)
    u = torch.eye(8, dtype=torch.float64).expand(2, 4, 8, 8).contiguous()
    expected = direct(inputs["q"], inputs["k"], inputs["g"], inputs["beta"], ridge, h)
    rho = 1 / (1 + 2 * ridge)
    sigma = rho / (1 + (1 - rho * rho) ** 0.5)
    bound = 2 * sigma ** (num_iters + 1) / (1 + sigma ** (2 * num_iters + 2))
    for form in (naive_gka, chunk_gka, recurrent_gka):
        o, _ = form(**inputs, initial_state=(h, u), scale=1.0, ridge=ridge, num_iters=num_iters)
        relative = (o - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert relative.max() <= bound + 1e-12


@pytest.mark.parametrize("gate", ["slow", "fast", "mixed", "usual"])
@pytest.mark.parametrize("keys", ["random", "same", "few"])
def test_fp32_stays_close_when_the_gram_matrix_is_nearly_singular(gate, keys):
    inputs = make_inputs("gka", 1, 100, gate=gate, dim=64)
    if keys == "same":
        inputs["k"] = inputs["k"][:, :1] + 1e-3 * inputs["k"]
    if keys == "few":
        inputs["k"] = inputs["k"][:, torch.arange(100) % 3]
    inputs["alpha"] = torch.ones_like(inputs["alpha"])
    expected = call(naive_gka, inputs)
    for form in (chunk_gka, recurrent_gka, naive_gka):
        assert error(call(form, cast(inputs, torch.float32))[0], expected[0]) < 1e-4


def test_no_iterations_skip_the_solver_but_keep_the_gram_state():
    inputs, state = make_inputs("gka", 2, 70), make_state("gka", 2)
    solved = call(naive_gka, inputs, state)
    plain = call(naive_gka, {**inputs, "alpha": torch.zeros_like(inputs["alpha"])}, state)
    for form in (naive_gka, chunk_gka, recurrent_gka):
        o, h, u = call(form, inputs, state, num_iters=0)
        assert error(o, plain[0]) < 1e-12 and error(h, solved[1]) < 1e-12 and error(u, solved[2]) < 1e-12


def test_output_does_not_depend_on_the_scale_of_the_states():
    """lambda scales with H, so merging states by mean or by sum is the same, however small they are."""
    inputs, (h, u) = make_inputs("gka", 1, 70, gate="usual"), make_state("gka", 1)
    inputs["k"], inputs["v"] = torch.zeros_like(inputs["k"]), torch.zeros_like(inputs["v"])
    inputs["alpha"] = torch.ones_like(inputs["alpha"])
    inputs["g"] = torch.full_like(inputs["g"], -0.5)  # from 1 to 1e-15
    expected = call(naive_gka, inputs, (h, u))[0]
    small = tuple((1e-12 * x).float() for x in (h, u))
    for form in (naive_gka, chunk_gka, recurrent_gka):
        assert error(call(form, cast(inputs, torch.float32), small)[0], expected) < 1e-4


@pytest.mark.parametrize("wrong", [{"ridge": 0.0}, {"num_iters": -1}])
def test_solver_settings_are_checked(wrong):
    with pytest.raises(ValueError, match="ridge"):
        chunk_gka(**make_inputs("gka", 1, 3), **wrong)
