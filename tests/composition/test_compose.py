"""Composed caches against plain reading and against loops written out."""

import copy
from functools import partial

import pytest
import torch
import transformers
from hybrid_cases import CACHE, MIXERS, hybrid, run, source, tokens

from hybridize.composition import reader
from hybridize.composition.compose import compose
from hybridize.composition.growing import Buffer, GrowingLayer
from hybridize.composition.reader import read_chunks, read_prefix
from hybridize.composition.states import METHODS
from hybridize.errors import UsageError

PLAIN = {"llama": "llama", "window": "mistral-window", "both": "qwen2-window"}  # window: 11 tokens
MODELS = [*MIXERS, *PLAIN, "pair"]  # pair: two mixers around a window of the source's own
PREFIX, UNEVEN = 13, (40, 9, 25)


def model_of(name):
    if name in PLAIN:
        return source(PLAIN[name])
    return hybrid("mistral-window", "pair") if name == "pair" else hybrid("qwen3", name)


def text(lengths=UNEVEN, prefix=PREFIX, seed=0):
    """The prefix and the chunks, random."""
    ids = tokens(1, prefix + sum(lengths), seed)[0]
    return ids[:prefix], list(ids[prefix:].split(lengths))


def read(model, prefix, chunks, sequential=False, **more):
    memory = read_prefix(model, prefix)
    starts = [len(prefix) + (sum(map(len, chunks[:i])) if sequential else 0) for i in range(len(chunks))]
    return memory, list(read_chunks(model, memory, chunks, starts, **more))


def composed(model, lengths=UNEVEN, prefix=PREFIX, sequential=False, **more):
    return compose(model, *read(model, *text(lengths, prefix), sequential), **more)


def logits(model, what, ids):
    return model.get_output_embeddings()(what.read(model, ids)).detach()


def close(got, want, what, tolerance=1e-4):
    error = (got - want).abs().max().item() if want.numel() else 0.0
    assert error < tolerance, f"{what} is off by {error:.1e}"


@pytest.mark.parametrize("prefix", [0, PREFIX])
@pytest.mark.parametrize("name", MODELS)
def test_one_chunk_is_plain_reading(name, prefix):
    model, question = model_of(name), tokens(2, 7, seed=5)
    before, chunks = text((40,), prefix)
    plain = torch.cat([before, *chunks]).expand(2, -1)
    want = run(model, torch.cat([plain, question], 1), use_cache=False).logits[:, -7:]
    for method in METHODS if name not in PLAIN else ["picaso"]:
        if method == "none" or (method == "sum" and prefix):  # no chunk's state; the prefix's undecayed
            continue
        for kv in ("concat", "window", "full"):
            got = composed(model, (40,), prefix, method=method, kv=kv)
            assert got.tokens == got.position == prefix + 40
            close(logits(model, got, question), want, f"{name} {method} {kv}")


@pytest.mark.parametrize("name", MODELS)
def test_batches_are_read_as_one_by_one(name, monkeypatch):
    """Rows of uneven length, the shortest over while the longest goes on, in pieces."""
    monkeypatch.setattr(reader, "SHORTEST_PIECE", 4)
    monkeypatch.setattr(reader, "PIECE_TOKENS", 12)
    model = model_of(name)
    before, chunks = text((40, 1, 9, 25, 40))
    _, alone = read(model, before, chunks, batch_tokens=1)
    _, together = read(model, before, chunks)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.ids, other.ids) and one.start == other.start
        for mine, theirs in ((one.layers, other.layers), (one.transitions, other.transitions)):
            for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                assert a.keys() == b.keys()
                for x in a:
                    assert a[x].shape == b[x].shape
                    largest = max(1.0, b[x].abs().max().item()) if b[x].numel() else 1.0
                    close(a[x] / largest, b[x] / largest, f"{name} layer {i} {x}", 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_chunk_is_what_the_model_keeps_of_it(name):
    """Keys of its own tokens alone, states behind them, transitions multiplied over the pieces of a forward."""
    model = model_of(name)
    before, chunks = text()
    _, read_together = read(model, before, chunks)
    for chunk, got in zip(chunks, read_together, strict=True):
        cache = run(model, torch.cat([before, chunk])[None])[CACHE]
        for layer, kept in zip(cache.layers, got.layers, strict=True):
            want = getattr(layer, "state", None) or {"keys": layer.keys, "values": layer.values}
            for x, y in kept.items():
                whole = want[x][0]
                if x in ("keys", "values") and not hasattr(layer, "state"):
                    whole = whole[:, -y.shape[1] :]
                    assert y.shape[1] == min(len(chunk), 10 if layer.is_sliding else len(chunk))
                close(y.float(), whole.float(), f"{name} {x}")


def out_of_memory(limit, error):
    """A reading that has memory for `limit` rows."""
    original, counts = reader._read, []

    def limited(model, prefix, chunks, *args, **kwargs):
        counts.append(len(chunks))
        if len(chunks) > limit:
            raise error
        return original(model, prefix, chunks, *args, **kwargs)

    return limited, counts


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_batch_that_does_not_fit_is_halved(error, monkeypatch):
    model = model_of("gdn")
    before, chunks = text((9, 8, 7, 6, 5, 4, 3))
    memory, want = read(model, before, chunks)
    limited, counts = out_of_memory(2, error)
    monkeypatch.setattr(reader, "_read", limited)
    got = list(read_chunks(model, memory, chunks, [PREFIX] * 7))
    assert counts == [7, 3, 1, 1, 1, 1, 1, 1, 1]
    for a, b in zip(got, want, strict=True):
        for x, y in zip(a.layers, b.layers, strict=True):
            for name in x:
                close(x[name].float(), y[name].float(), name, 1e-5)
    limited, counts = out_of_memory(0, error)
    monkeypatch.setattr(reader, "_read", limited)
    with pytest.raises(type(error)):
        list(read_chunks(model, memory, chunks, [PREFIX] * 7))
    limited, counts = out_of_memory(0, RuntimeError("something else"))
    monkeypatch.setattr(reader, "_read", limited)
    with pytest.raises(RuntimeError, match="something else"):
        list(read_chunks(model, memory, chunks, [PREFIX] * 7))
    assert counts == [7]


def greedy(model, what, question, new):
    """Greedy tokens, each from a forward with its position given."""
    cache, at = what.cache(), what.position
    ids, out = question[None], []
    for _ in range(new):
        positions = torch.arange(at, at + ids.shape[1])[None]
        step = run(model, ids, cache, position_ids=positions)
        at += ids.shape[1]
        ids = step.logits[:, -1:].argmax(-1)
        out.append(ids[0, 0].item())
    return out


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("kv", ["concat", "window", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_generate(name, kv, sequential):
    model, question = model_of(name), tokens(1, 6, seed=9)[0]
    what = composed(model, kv=kv, sequential=sequential)
    total = PREFIX + sum(UNEVEN)
    assert what.position == (total if sequential or kv == "full" else PREFIX + max(UNEVEN))
    assert what.tokens == (PREFIX + UNEVEN[-1] if kv == "window" else total)
    want = greedy(model, what, question, 10)
    for _ in range(2):  # a second question finds everything as the first did
        inputs = what.inputs(question)
        assert inputs["input_ids"].shape[1] == what.tokens + 6
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=10, do_sample=False)
        assert out[0, inputs["input_ids"].shape[1] :].tolist() == want, f"{name} {kv}"
        assert torch.equal(out[:, : what.tokens], what.ids[None])
    with torch.no_grad():
        beam = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False}
        got = model.generate(**what.inputs(question, rows=3), **beam)
        batch = torch.stack([question, tokens(1, 6, seed=10)[0]])
        two = model.generate(**what.inputs(batch, rows=3), **beam)
    assert torch.equal(two[:1], got)
    assert got[0, what.tokens + 6 :].tolist() == beams(model, what, question, 3, 8), f"{name} {kv} beams"


def beams(model, what, question, width, new):
    """Beam search without an end token: every candidate is read from a cache of its own."""
    live = [((), 0.0)]
    for _ in range(new):
        found = []
        for ids, score in live:
            hidden = what.read(model, torch.cat([question, torch.tensor(ids, dtype=torch.long)])[None])
            scores = model.get_output_embeddings()(hidden[0, -1]).log_softmax(-1)
            found += [((*ids, i), score + x) for i, x in enumerate(scores.tolist())]
        live = sorted(found, key=lambda item: -item[1])[:width]
    return list(live[0][0])


def in_order(state, by, added, *order):
    for i in order:
        state = by[i] @ state + added[i]
    return state


@pytest.mark.parametrize("name", ["gka", "gdn", "mamba2"])
def test_the_prefix_counts_once(name):
    """A prefix longer than all chunks: in a sum its state stands once, undecayed, beside what each chunk added."""
    model = model_of(name)
    memory, chunks = read(model, *text((5, 4, 6), prefix=90))
    for method in METHODS:
        what = compose(model, memory, chunks, method=method)
        for i, layer in enumerate(memory.layers):
            for x in {"H", "U", "S", "h"} & layer.keys():
                start, states = layer[x], [chunk.layers[i][x] for chunk in chunks]
                steps = [chunk.transitions[i] for chunk in chunks]
                by = [t["P"] if "P" in t else t["log_decay"].exp()[:, None, None] * torch.eye(16) for t in steps]
                added = [s - p @ start for s, p in zip(states, by, strict=True)]
                order = partial(in_order, start, by, added)
                rotated = (order(0, 1, 2) + order(1, 2, 0) + order(2, 0, 1)) / 3
                turned = (order(0, 2, 1) + order(2, 1, 0) + order(1, 0, 2)) / 3
                want = {
                    "sum": start + sum(added),
                    "soup": sum(states) / 3,
                    "ordered": order(0, 1, 2),
                    "picaso": rotated if name == "gdn" else (rotated + turned) / 2,
                    "picaso-r": rotated,
                    "none": start,
                }
                close(what.layers[i][x], want[method], f"{name} {method} {x}", 1e-5 * max(1, want[method].abs().max()))


def test_questions_share_the_keys_and_do_not_disturb_one_another():
    model = model_of("mixed")
    what = composed(model)
    (at,) = [i for i, kept in enumerate(what.layers) if isinstance(kept, Buffer)]
    before = what.layers[at].keys[:, :, : what.tokens].clone()
    alone = [logits(model, what, tokens(1, 20, seed=s)) for s in (1, 2)]
    caches, address = [what.cache(), what.cache()], what.layers[at].keys.data_ptr()
    assert all(cache.layers[at].keys.data_ptr() == address for cache in caches)
    place = torch.arange(what.position, what.position + 20)[None]
    got = [[], []]
    for begin in range(0, 20, 5):  # by turns
        for turn in (0, 1):
            ids = tokens(1, 20, seed=turn + 1)[:, begin : begin + 5]
            got[turn].append(run(model, ids, caches[turn], position_ids=place[:, begin : begin + 5]).logits)
    for turn in (0, 1):
        close(torch.cat(got[turn], 1), alone[turn], f"question {turn}")
    assert caches[0].layers[at].keys.data_ptr() == address != caches[1].layers[at].keys.data_ptr()
    del caches
    assert torch.equal(what.layers[at].keys[:, :, : what.tokens], before)
    later = what.cache()
    run(model, tokens(1, 5), later, position_ids=place[:, :5])
    assert later.layers[at].keys.data_ptr() == address


def test_crop_and_copy():
    """Drafts that are taken back, also of composed tokens; and a copied cache."""
    model = model_of("llama")
    what = composed(model)
    before = what.layers[0].keys[:, :, : what.tokens].clone()
    cache, plain = what.cache(), transformers.DynamicCache()
    for i, kept in enumerate(what.layers):
        plain.update(kept.keys[:, :, : what.tokens], kept.values[:, :, : what.tokens], i)
    place = torch.arange(what.position, what.position + 60)[None]
    for ids, at, back in ((tokens(1, 20), 0, -7), (tokens(1, 9, 1), 13, -30), (tokens(1, 40, 2), 5, -1)):
        twin = copy.deepcopy(cache)
        where = place[:, at : at + ids.shape[1]]
        want = run(model, ids, plain, position_ids=where).logits
        close(run(model, ids, cache, position_ids=where).logits, want, "the cache")
        close(run(model, ids, twin, position_ids=where).logits, want, "its copy")
        cache.crop(back)
        plain.crop(back)
        assert cache.get_seq_length() == plain.get_seq_length()
    assert torch.equal(what.layers[0].keys[:, :, : what.tokens], before)


def test_a_layer_grows_by_doubling():
    """It is a DynamicLayer, but tokens that are there are copied only when the room is full."""
    keys = torch.randn(1, 2, 300, 4)
    layer, plain = GrowingLayer(), transformers.DynamicCache()
    addresses = set()
    for i in range(300):
        got = layer.update(keys[:, :, i : i + 1], -keys[:, :, i : i + 1])
        want = plain.update(keys[:, :, i : i + 1], -keys[:, :, i : i + 1], 0)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        addresses.add(layer.buffer.capacity)
    assert len(addresses) <= 10
    for other in (layer, plain.layers[0]):
        other.batch_repeat_interleave(3)
        other.update(torch.arange(24.0).view(3, 2, 1, 4), torch.ones(3, 2, 1, 4))
        other.reorder_cache(torch.tensor([2, 0, 0]))
        other.update(torch.arange(24.0).view(3, 2, 1, 4), torch.ones(3, 2, 1, 4))
        other.batch_select_indices(torch.tensor([1, 2]))
    assert torch.equal(layer.keys, plain.layers[0].keys) and torch.equal(layer.values, plain.layers[0].values)
    layer.reset()
    assert layer.get_seq_length() == 0
    layer.update(keys, keys)
    assert torch.equal(layer.keys, keys)


def test_chunks_can_be_given_up():
    model = model_of("mixed")
    memory, chunks = read(model, *text())
    want = logits(model, compose(model, memory, chunks), tokens(1, 5))
    got = compose(model, memory, chunks, release=True)
    assert torch.equal(logits(model, got, tokens(1, 5)), want)
    assert not any(layer for chunk in chunks for layer in (*chunk.layers, *chunk.transitions))


def test_what_cannot_be_composed_is_refused():
    model = model_of("llama")
    memory, chunks = read(model, *text())
    for wrong in ({"method": "stew"}, {"kv": "some"}):
        with pytest.raises(UsageError, match="choose from"):
            compose(model, memory, chunks, **wrong)
    with pytest.raises(UsageError, match="no chunk"):
        compose(model, memory, [])
    with pytest.raises(UsageError, match="no tokens"):
        list(read_chunks(model, memory, [tokens(1, 0)[0]], [PREFIX]))
    with pytest.raises(UsageError, match="starts at 3"):
        list(read_chunks(model, memory, [tokens(1, 4)[0]], [3]))
    with pytest.raises(UsageError, match="no tokens"):
        compose(model, memory, chunks).inputs(tokens(1, 0)[0])
