"""The one-layer sweep against whole forwards of the changed model, its cost, and what it holds in memory."""

from contextlib import contextmanager

import pytest
import torch
from hybrid_cases import source, tokens
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridize.errors import ConversionError, NonFiniteError
from hybridize.probing.swa_proxy import Sweep, windows
from hybridize.probing.windowed import windowed
from hybridize.tasks.scored import Scored, score_text

LAYERS, LENGTH = 4, 24


def batches_of(length: int = LENGTH) -> list[Scored]:
    """Two batches of text, of different sizes, and one of two answers at the end of shorter rows."""
    text = score_text(tokens(3, length, seed=5), "prose", batch_tokens=2 * length, per_row=7)
    ids = tokens(2, length - 5, seed=6)
    targets = torch.zeros_like(ids).bool()
    targets[0, -3:] = True
    targets[1, -2:] = True
    return [*text, Scored(ids, targets, "passkey")]


def measured(model, batches: list[Scored]) -> dict[str, tuple]:
    """By group: log-probabilities [P, V], targets [P], and the row of each, from whole forwards."""
    found: dict[str, list] = {}
    for batch in batches:
        with torch.no_grad():
            logits = model(batch.ids, use_cache=False).logits.double().log_softmax(-1)
        row, column = batch.targets.nonzero(as_tuple=True)
        pieces = (logits[row, column - 1], batch.ids[row, column], row + 100 * len(found.get(batch.group, [])))
        found.setdefault(batch.group, []).append(pieces)
    return {group: tuple(map(torch.cat, zip(*pieces, strict=True))) for group, pieces in found.items()}


def expected(model, batches: list[Scored], base: dict[str, tuple]) -> dict[str, dict[str, float]]:
    effects = {}
    for group, (logp, wanted, row) in measured(model, batches).items():
        index = torch.arange(len(wanted))
        before = base[group][0]
        right = logp.argmax(-1) == wanted
        effects[group] = {
            "loss": (before - logp)[index, wanted].mean().item(),
            "kl": (before.exp() * (before - logp)).sum(-1).mean().item(),
            "accuracy": sum(bool(right[row == r].all()) for r in row.unique()) / len(row.unique()),
            "tokens": len(wanted),
            "rows": len(row.unique()),
        }
    return effects


@pytest.mark.parametrize("case", ["llama", "mistral-window", "qwen2-window", "qwen3", "phi3"])
def test_equals_whole_forwards(case: str) -> None:
    model, batches = source(case, LAYERS).double(), batches_of()
    base = measured(model, batches)
    sweep = Sweep(model, batches)
    for group, (logp, wanted, _) in base.items():
        assert sweep.base[group]["loss"] == pytest.approx(-logp.gather(1, wanted[:, None]).mean().item(), abs=1e-5)
    results = dict(sweep.run(windows(model, [3, 8], sinks=2)))
    assert list(results) == list(range(LAYERS))
    assert all(
        config is model.config
        for config in {id(x.self_attn.config): x.self_attn.config for x in model.model.layers}.values()
    )
    for number, by_change in results.items():
        assert list(by_change) == ["3", "8"]
        for size, got in by_change.items():
            with windowed(model.model.layers[number].self_attn, int(size), 2):
                want = expected(model, batches, base)
            assert got.keys() == want.keys()
            for group, effect in want.items():
                assert got[group] == pytest.approx(effect, abs=2e-6), (number, size, group)
    assert max(by["3"]["prose"]["kl"] for by in results.values()) > 1e-3


def test_other_layers_may_be_changed_around_a_run() -> None:
    model, batches = source("llama", LAYERS).double(), batches_of()
    base, sweep = measured(model, batches), Sweep(model, batches)
    with windowed(model.model.layers[2].self_attn, 4, 1):
        results = dict(sweep.run(windows(model, [4], sinks=1), skip={2}))
        assert list(results) == [0, 1, 3]
        for number in results:
            with windowed(model.model.layers[number].self_attn, 4, 1):
                want = expected(model, batches, base)
            assert results[number]["4"]["prose"] == pytest.approx(want["prose"], abs=2e-6)


def test_a_window_of_the_whole_context_loses_nothing_at_all() -> None:
    model = source("qwen3", LAYERS)
    for _, by_change in Sweep(model, batches_of()).run(windows(model, [LENGTH, 5000])):
        for groups in by_change.values():
            assert all(effect["kl"] == effect["loss"] == 0.0 for effect in groups.values())


def test_skipped_layers_change_no_other_result() -> None:
    model, batches = source("llama", LAYERS), batches_of()
    whole = dict(Sweep(model, batches).run(windows(model, [4])))
    rest = dict(Sweep(model, batches).run(windows(model, [4]), skip={0, 1}))
    assert rest == {2: whole[2], 3: whole[3]}


def test_cost_is_half_a_forward_per_layer_and_window() -> None:
    """Layer passes: L for the base, L to carry the stream on, and L (L + 1) / 2 per window; positions of the head."""
    model, batches = source("llama", LAYERS), batches_of()[:2]
    passes, positions = [0], [0]

    def count(cell: list[int], x: torch.Tensor) -> None:
        cell[0] += x[..., 0].numel()

    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, out: count(passes, out))
    model.lm_head.register_forward_hook(lambda module, args, out: count(positions, out))
    advanced: list[int] = []
    list(Sweep(model, batches, advanced.append).run(windows(model, [3, 4, 5])))
    total, scored = 3 * LENGTH, 3 * 7
    assert passes[0] == total * (2 * LAYERS + 3 * LAYERS * (LAYERS + 1) // 2) == sum(advanced)
    assert positions[0] == scored * (2 + LAYERS * (1 + 3))


class LargestTensor(TorchDispatchMode):
    """Remembers the most numbers that any one operation has given."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        # A view of few numbers is not large.
        sizes = [
            x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(out) if isinstance(x, torch.Tensor)
        ]
        self.largest = max(self.largest, *sizes, 0)
        return out


@pytest.mark.parametrize("case", ["llama", "mistral-window", "qwen3-grouped"])
def test_memory_is_linear_in_the_context(case: str) -> None:
    more = {"max_position_embeddings": 4096}
    model = source("qwen3", 2, num_key_value_heads=2, **more) if case == "qwen3-grouped" else source(case, 2, **more)
    largest = {}
    for length in (1024, 2048):
        with LargestTensor() as mode:
            list(Sweep(model, score_text(tokens(1, length), "prose", length)).run(windows(model, [64])))
        largest[length] = mode.largest
    assert largest[2048] <= 2 * largest[1024]
    assert largest[2048] < 2048 * 2048 / 4


def test_names_the_changed_layer_when_only_the_change_is_not_finite() -> None:
    model = source("llama", LAYERS)

    @contextmanager
    def broken(number: int):
        hook = model.model.layers[number].register_forward_hook(lambda m, a, out: out * float("nan"))
        yield
        hook.remove()

    with pytest.raises(NonFiniteError, match=r"With layer 0 changed \(broken\), the loss on prose"):
        list(Sweep(model, batches_of()).run({"broken": broken}))


def test_refuses_attention_that_it_cannot_reach() -> None:
    model = source("llama", LAYERS)
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **kwargs: (attention.o_proj(hidden_states), None)
    with pytest.raises(ConversionError, match="attention of layer 1 computes its scores in a way of its own"):
        list(Sweep(model, batches_of()).run(windows(model, [4])))


def test_weights_may_stay_outside_of_the_device() -> None:
    """accelerate keeps them elsewhere and brings each in for its own forward, as a device_map with a CPU does."""
    from accelerate import cpu_offload

    model, batches = source("llama", LAYERS), batches_of()
    plain = Sweep(model, batches)
    want = dict(plain.run(windows(model, [4])))
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in model.model.layers[0].parameters())
    offloaded = Sweep(model, batches)
    assert offloaded.base == plain.base
    assert dict(offloaded.run(windows(model, [4]))) == want
