"""Hankel rank: exact values of known operators, the source's own attention, and the estimate against the exact form."""

import math

import pytest
import torch
from hybrid_cases import CASES, source, tokens
from torch import Tensor

from hybridize.builtin import builtin_text, open_builtin
from hybridize.errors import NonFiniteError, SourceError, UsageError
from hybridize.hybrid.walk import capture_layer_inputs, run_layer
from hybridize.kernels.gdn import naive_gated_delta_rule
from hybridize.kernels.gka import naive_gka
from hybridize.kernels.ssd import naive_ssd
from hybridize.probing.hankel import (
    STATISTICS,
    VARIANTS,
    HankelOptions,
    Mixing,
    hankel_score,
    hankel_sweep,
    layer_hankel,
    mean_results,
    mixing_of,
)
from hybridize.probing.spectrum import Estimate, estimated_spectrum, exact_spectrum, spectrum_statistics

T, DIM = 256, 16


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Given:
    """Mixing matrices [B, H, T, T] that are known, where layer_hankel wants a layer's queries and keys."""

    def __init__(self, matrices: Tensor, group: int = 1, state: int = DIM):
        self.matrices, self.group, self.state = matrices, group, state
        self.shape, self.device = matrices.shape[:3], matrices.device

    def block(self, sequence: int, heads: list[int], split: int) -> Tensor:
        return self.matrices[sequence, heads, split:, :split]


def measure(matrix: Tensor, **options):
    """The statistics of one head's mixing matrix [T, T], with a relative threshold below all that is not rounding."""
    result = layer_hankel(Given(matrix[None, None]), HankelOptions(relative=1e-6, **options))
    return {variant: {name: x["mean"] for name, x in names.items()} for variant, names in result.items()}


def recurrent_matrix(kind: str) -> Tensor:
    """M [T, T] of a head with key dimension DIM: its response to each unit input, as values that are the identity."""
    q, k = draw(1, T, 1, DIM), draw(1, T, 1, DIM, seed=1)
    v = torch.eye(T, dtype=torch.float64)[None, :, None]
    # Slow decay: with a fast one, what is written early falls below any threshold.
    g = -0.01 * draw(1, T, 1, seed=2).abs()
    beta, alpha = draw(1, T, 1, seed=3).sigmoid(), draw(1, T, 1, seed=4).sigmoid()
    if kind == "gka":
        o, _ = naive_gka(q, k, v, g, beta, alpha)
    elif kind == "gdn":
        o, _ = naive_gated_delta_rule(q, k, v, g, beta)
    else:
        o, _ = naive_ssd(v, -g, torch.full((1,), -1.0, dtype=torch.float64), k, q)
    return o[0, :, 0]


@pytest.mark.parametrize("kind", ["gla", "gdn", "gka"])
@pytest.mark.parametrize("method", ["exact", "estimate"])
def test_a_recurrent_head_has_the_rank_of_its_state(kind, method):
    found = measure(recurrent_matrix(kind), method=method, state=DIM)
    assert found["all"]["relative_rank"] == found["no_sinks"]["relative_rank"] == DIM
    assert found["all"]["tail"] < 1e-6
    assert measure(recurrent_matrix(kind), method=method, state=DIM - 1)["all"]["tail"] > 1e-4


@pytest.mark.parametrize("window", [1, 2, 33])
def test_a_sliding_window_has_less_rank_than_its_width_and_nothing_beyond(window):
    i, j = torch.arange(T)[:, None], torch.arange(T)
    # Random scores, and equal ones, for which the block's triangle is well conditioned.
    for scores, lowest in ((draw(T, T), 0), (torch.zeros(T, T).double(), window - 1)):
        matrix = scores.masked_fill((j > i) | (j <= i - window), -math.inf).softmax(-1)
        found = measure(matrix, window=window, sinks=0)
        assert lowest <= found["all"]["relative_rank"] <= window - 1
        assert all(value == 0 for value in found["beyond"].values())
        if window > 1:
            # One token short: only the farthest tokens are beyond, on the triangle's hypotenuse.
            farthest = measure(matrix, window=window - 1, sinks=0, splits=(0.5,))["beyond"]
            weights = matrix.diagonal(1 - window)[T // 2 - window + 1 : T // 2]
            assert farthest["relative_rank"] == window - 1
            assert farthest["nuclear"] == pytest.approx(weights.sum().item())


def test_a_sink_has_rank_one_and_nothing_without_its_column():
    matrix = torch.zeros(T, T, dtype=torch.float64)
    matrix[:, 0] = 1
    found = measure(matrix)
    assert found["all"]["relative_rank"] == found["all"]["rank"] == 1
    assert found["all"]["entropy"] == pytest.approx(1)
    assert found["all"]["stable"] == pytest.approx(1)
    assert found["all"]["nuclear"] == pytest.approx(math.sqrt(3 * T / 4))  # the earliest split sees most rows
    assert found["all"]["mass"] == 1
    assert all(value == 0 for value in found["no_sinks"].values())


@pytest.mark.parametrize("method", ["exact", "estimate"])
def test_a_copy_from_half_the_text_ago_has_full_rank(method):
    half = T // 2
    matrix = torch.eye(T, dtype=torch.float64).roll(half, 0).tril()
    found = measure(matrix, splits=(0.5,), window=64, sinks=0, state=half // 4, method=method)
    for variant in ("all", "beyond"):
        assert found[variant]["relative_rank"] == pytest.approx(half)
        assert found[variant]["nuclear"] == pytest.approx(half)
        assert found[variant]["entropy"] == pytest.approx(half)
        assert found[variant]["tail"] == pytest.approx(math.sqrt(3 / 4))
        assert found[variant]["tail_norm"] == pytest.approx(math.sqrt(3 * half / 4))


def test_statistics_of_known_singular_values():
    left, right = torch.linalg.qr(draw(3, 60, 40)).Q, torch.linalg.qr(draw(3, 40, 40, seed=1)).Q
    known = torch.stack([torch.linspace(0.01, 2, 40), 0.8 ** torch.arange(40), torch.ones(40)]).double()
    matrices = left * known[:, None] @ right.mT
    for given in (matrices, matrices.mT):
        values, weights = exact_spectrum(given)
        want = torch.linalg.svdvals(given)
        assert (values.flip(-1) - want).abs().max() < 1e-7
        assert (weights == 1).all()
    found = spectrum_statistics(exact_spectrum(matrices), absolute=0.05, relative=0.1, state=8)
    for n, s in enumerate(known.sort(descending=True).values.tolist()):
        total, nuclear = sum(x * x for x in s), sum(s)
        fewest = [next(r for r in range(41) if sum(x * x for x in s[:r]) >= p * total - 1e-9) for p in (0.9, 0.99)]
        entropy = math.exp(-sum(x / nuclear * math.log(x / nuclear) for x in s))
        tail = math.sqrt(sum(x * x for x in s[8:]))
        want = {
            "rank": sum(x > 0.05 for x in s),
            "relative_rank": sum(x > 0.1 * s[0] for x in s),
            "energy_90": fewest[0],
            "energy_99": fewest[1],
            "entropy": entropy,
            "nuclear": nuclear,
            "stable": total / s[0] ** 2,
            "tail": tail / math.sqrt(total),
            "tail_norm": tail,
        }
        assert found.keys() == want.keys()
        for name, value in want.items():
            assert found[name][n].item() == pytest.approx(value, rel=1e-6), (n, name)


@pytest.mark.parametrize("decay", [0.9, 0.99])
def test_an_estimate_counts_what_lies_beyond_its_basis(decay):
    """256 values, of which a basis of 32 finds the largest; without the quadrature 0.99 would lose most of them."""
    left, right = (torch.linalg.qr(draw(4, 320, 256, seed=seed)).Q for seed in (0, 1))
    known = decay ** torch.arange(256, dtype=torch.float64)
    matrices = (left * known @ right.mT).float()
    generator = torch.Generator().manual_seed(0)
    spectrum = estimated_spectrum(matrices, generator, Estimate(basis=32, probes=32, steps=24))
    assert spectrum[1].sum(-1).tolist() == pytest.approx([320] * 4, rel=0.05)  # 64 of them are zero
    found = spectrum_statistics(spectrum, absolute=0.2, relative=0.2, state=48)
    want = spectrum_statistics((known[None], torch.ones(1, 256)), absolute=0.2, relative=0.2, state=48)
    for name, value in want.items():
        assert found[name].mean().item() == pytest.approx(value.item(), rel=0.05), name


@pytest.mark.parametrize("case", CASES)
def test_the_captured_matrix_is_the_sources_own(case):
    model = source(case, attn_implementation="eager")
    ids = tokens(2, 24)
    with torch.no_grad():
        want = model(ids, output_attentions=True).attentions
    before = model.config._attn_implementation
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        (hidden,), arguments = capture_layer_inputs(model.base_model, [ids])
        for i, layer in enumerate(model.base_model.layers):
            mixing = mixing_of(layer, hidden, arguments[i], i)
            assert model.config._attn_implementation == implementation
            for sequence in range(2):
                for split in (1, 13, 23):
                    got = mixing.block(sequence, range(mixing.shape[1]), split)
                    assert (got - want[i][sequence, :, split:, :split]).abs().max() < 1e-6, (implementation, i)
                    assert (mixing.block(sequence, [3, 1], split) - got[[3, 1]]).abs().max() < 1e-6
            hidden = run_layer(layer, hidden, arguments[i])[0]
    assert before == "eager"


def test_rows_of_scores_in_pieces_change_nothing(monkeypatch):
    mixing = Mixing(draw(1, 4, 50, 8).float(), draw(1, 2, 50, 8, seed=1).float(), 0.5, window=20)
    whole = mixing.block(0, range(4), 17)
    monkeypatch.setattr("hybridize.probing.hankel.QUERY_ROWS", 7)
    assert (mixing.block(0, range(4), 17) - whole).abs().max() < 1e-6


def test_heads_in_pieces_change_nothing(monkeypatch):
    mixing = Mixing(draw(2, 4, 50, 8).float(), draw(2, 2, 50, 8, seed=1).float(), 0.5)
    for stacked in (False, True):
        options = HankelOptions(window=8, stacked=stacked)
        whole = layer_hankel(mixing, options)
        with monkeypatch.context() as patch:
            patch.setattr("hybridize.probing.hankel.BLOCK_ENTRIES", 1)
            pieces = layer_hankel(mixing, options)
        for variant, names in whole.items():
            for name, value in names.items():
                assert pieces[variant][name] == pytest.approx(value, rel=1e-5), (stacked, variant, name)


def test_heads_that_share_a_state_are_stacked():
    """Two heads of one group that read the same 16 values need 16, two that read different ones 32."""
    one, other = recurrent_matrix("gla"), draw(T, DIM, seed=7) @ draw(DIM, T, seed=8)
    for pair, rank in (((one, 2 * one), DIM), ((one, other), 2 * DIM)):
        mixing = Given(torch.stack(pair)[None], group=2)
        assert layer_hankel(mixing, HankelOptions(relative=1e-6))["all"]["relative_rank"]["mean"] == DIM
        stacked = layer_hankel(mixing, HankelOptions(relative=1e-6, stacked=True))
        assert stacked["all"]["relative_rank"]["mean"] == rank


def test_long_rows_are_measured_by_some_heads_at_the_middle(monkeypatch):
    mixing = Mixing(draw(1, 12, 48, 8).float(), draw(1, 4, 48, 8, seed=1).float(), 0.5)
    some = Mixing(mixing.q[:, [1, 4, 7, 10]], mixing.k, 0.5)
    middle = layer_hankel(some, HankelOptions(splits=(0.5,)))
    assert layer_hankel(mixing, HankelOptions(max_heads=4)) == layer_hankel(some, HankelOptions())
    monkeypatch.setattr("hybridize.probing.hankel.LONG", 47)
    monkeypatch.setattr("hybridize.probing.hankel.LONG_HEADS", 4)
    assert layer_hankel(mixing) == middle
    stacks = layer_hankel(mixing, HankelOptions(stacked=True, max_heads=2))
    whole = Mixing(mixing.q[:, [3, 4, 5, 9, 10, 11]], mixing.k[:, [1, 3]], 0.5)
    assert stacks == layer_hankel(whole, HankelOptions(stacked=True))


def test_heads_and_sequences_are_summed_up_as_stated():
    """Heads by mean and 90th percentile, splits by the largest, sequences by the mean."""
    matrices = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
    for sequence, ranks in enumerate([(0, 1, 2), (2, 2, 2)]):
        for head, rank in enumerate(ranks):
            matrices[sequence, head, 4 : 4 + rank, 4 - rank : 4] = torch.eye(rank, dtype=torch.float64)
    result = layer_hankel(Given(matrices), HankelOptions(sinks=0))
    assert result["all"]["rank"]["mean"] == pytest.approx((1 + 2) / 2)
    assert result["all"]["rank"]["p90"] == pytest.approx((1.8 + 2) / 2)
    assert result == mean_results([layer_hankel(Given(m[None]), HankelOptions(sinks=0)) for m in matrices])


def test_the_sweep_measures_each_layer_on_all_rows():
    model, rows = source("qwen3"), tokens(3, 40)
    options = HankelOptions(window=8)
    seen, told = [], []
    results = hankel_sweep(model, rows, options, advance=seen.append, done=lambda i, r: told.append((i, r)))
    assert list(results) == [0, 1, 2] and told == list(results.items()) and seen == [40] * 9
    assert hankel_sweep(model, rows, options, layers=[1]) == {1: results[1]}
    with torch.no_grad():
        model.set_attn_implementation("eager")
        attentions = model(rows, output_attentions=True).attentions
    for i, matrices in enumerate(attentions):
        want = layer_hankel(Given(matrices, state=16), options)
        for variant, names in want.items():
            for name, value in names.items():
                assert results[i][variant][name] == pytest.approx(value, rel=1e-3, abs=1e-3), (i, variant, name)


def test_scores_by_name():
    result = layer_hankel(Given(torch.eye(8)[None, None].roll(2, -2).tril()), HankelOptions(sinks=0))
    assert hankel_score(result) == hankel_score(result, "no_sinks.rank") == pytest.approx(2)
    assert hankel_score(result, "all.rank.p90") == 2
    windowed = layer_hankel(Given(torch.eye(8)[None, None]), HankelOptions(window=2))
    assert {name: tuple(found) for name, found in windowed.items()} == dict.fromkeys(VARIANTS, STATISTICS)
    with pytest.raises(UsageError, match=r"no_sinks\.rank"):
        hankel_score(result, "all.rang")


def test_bad_input_is_named():
    model, rows = source("llama"), tokens(1, 16)
    with pytest.raises(UsageError, match="auto, exact or estimate"):
        hankel_sweep(model, rows, HankelOptions(method="svd"))
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="layer 1"):
        hankel_sweep(model, rows)
    model.model.layers[0].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(SourceError, match=r"layer 0.*cannot be read"):
        hankel_sweep(model, rows)
    assert model.config._attn_implementation == "sdpa"


def test_the_estimate_agrees_with_the_exact_form_on_the_real_model():
    """Every statistic of some layers of the built-in model within 5 %, at 1024 tokens of its own text."""
    built_in = open_builtin()
    text = "\n\n".join(document.text for document, _ in zip(builtin_text("held-out"), range(3), strict=False))
    ids = torch.tensor([built_in.tokenizer(text)["input_ids"][:1024]])
    model = built_in.load(torch.float32, torch.device("cpu"))
    options = {"splits": (0.5,), "window": 128}
    exact, estimate = (
        hankel_sweep(model, ids, HankelOptions(method=method, **options), layers=[0, 5])
        for method in ("exact", "estimate")
    )
    for i, result in exact.items():
        for variant, names in result.items():
            for name, value in names.items():
                got = estimate[i][variant][name]["mean"]
                assert got == pytest.approx(value["mean"], rel=0.05), (i, variant, name)
