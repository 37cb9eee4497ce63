"""Documents packed into a row are as independent as each alone, with or without a cache, a mask, padding."""

import pytest
import torch
from hybrid_cases import CASES, EVERY, GKA, cache_of, check_equal, hybrid, make, row_states, run, states, tokens
from transformers import DynamicCache

ROWS = ((30, 20, 14), (17, 47))  # lengths of the documents of each row
MORE = 9


def attend(model, how):
    model.set_attn_implementation(how)
    return model


def pack(rows, width=64, gap=0, left=0):
    """Ids, restarting positions and mask of rows of documents; `left` tokens of padding before, `gap` between."""
    ids, place, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    for i, row in enumerate(rows):
        at = left
        for document in row:
            here = slice(at, at + len(document))
            ids[i, here], mask[i, here], place[i, here] = document, 1, torch.arange(len(document))
            at += len(document) + gap
    return ids, place, mask


def check_packed(model, what):
    rows = [[tokens(1, n, seed=n)[0] for n in lengths] for lengths in ROWS]
    turn = tokens(2, MORE, seed=5)
    alone = [[run(model, d[None]) for d in row] for row in rows]
    last = [states(cache_of(row[-1]), model) for row in alone]
    want = [torch.cat([out.logits[0] for out in row]) for row in alone]
    after = [run(model, turn[i : i + 1], cache_of(alone[i][-1])) for i in range(2)]

    ids, place, mask = pack(rows)
    assert mask.all()
    plain = run(model, ids)
    assert (plain.logits[0] - want[0])[30:].abs().max() > 1e-2, f"{what}: documents must matter"
    ways = {
        "no cache": {"use_cache": False},
        "default cache": {},
        "no cache, mask": {"use_cache": False, "attention_mask": mask},
        "own cache, mask": {"attention_mask": mask, "cache": DynamicCache()},
    }
    for way, arguments in ways.items():
        out = run(model, ids, position_ids=place, **arguments)
        for i in range(2):
            check_equal({"logits": out.logits[i]}, {"logits": want[i]}, f"{what} {way} row {i}")
            if "no cache" in way:
                continue
            got = row_states(cache_of(out), model, i)
            check_equal(got, last[i], f"{what} {way} row {i}")
    # The last document of each row goes on from the cache, in two pieces.
    base = torch.tensor([[14], [47]])
    logits = []
    for piece in (slice(0, 5), slice(5, MORE)):
        out = run(model, turn[:, piece], cache_of(out), position_ids=base + torch.arange(MORE)[piece])
        logits.append(out.logits)
    for i in range(2):
        got = {
            "logits": torch.cat(logits, 1)[i : i + 1],
            **row_states(cache_of(out), model, i),
        }
        check_equal(got, {"logits": after[i].logits, **states(cache_of(after[i]), model)}, f"{what} continued row {i}")

    gap, left = 3, 2
    ids, place, mask = pack(rows, 76, gap, left)
    for cached in (False, True):
        out = run(model, ids, position_ids=place, attention_mask=mask, use_cache=cached)
        for i in range(2):
            got = {"logits": out.logits[i, mask[i].bool()]}
            check_equal(got, {"logits": want[i]}, f"{what} padded {gap, left} row {i} cache {cached}")
    # A new document in a later forward, and the cache cut in the middle of a document.
    cut = 40
    first = run(model, ids[:, :cut], position_ids=place[:, :cut], attention_mask=mask[:, :cut])
    second = run(model, ids[:, cut:], cache_of(first), position_ids=place[:, cut:], attention_mask=mask)
    out = torch.cat([first.logits, second.logits], 1)
    for i in range(2):
        got = {
            "logits": out[i, mask[i].bool()],
            **row_states(cache_of(second), model, i),
        }
        check_equal(got, {"logits": want[i], **last[i]}, f"{what} padded {gap, left} cut row {i}")


@pytest.mark.parametrize(("case", "mixer"), EVERY)
def test_packed(case, mixer):
    check_packed(hybrid(case, mixer), f"{case} {mixer}")


@pytest.mark.parametrize("case", CASES)
def test_packed_eager(case):
    model = make(case, "*-GDN-SWA-*", {"window": 8, "sinks": 2})
    check_packed(attend(model, "eager"), f"{case} eager")
    check_packed(attend(model, "sdpa"), f"{case} sdpa")


@pytest.mark.parametrize("pattern", ["GKA-M2-*", "*-*-M2", "*-M2-*", "GKA-GDN-M2"])
def test_packed_whatever_comes_first(pattern):
    check_packed(make("qwen2", pattern, GKA if "GKA" in pattern else None), f"qwen2 {pattern}")


@pytest.mark.parametrize("mixer", ["mixed", "gdn"])
def test_positions_that_leap_ahead_are_one_document(mixer):
    model = hybrid("llama", mixer)
    ids, place = tokens(2, 40), torch.cat([torch.arange(20), 25 + torch.arange(20)])[None]
    want = run(model, ids, position_ids=place).logits
    changed = ids.clone()
    changed[:, 3] = changed[:, 3] % 63 + 1
    assert (run(model, changed, position_ids=place).logits - want)[:, 20:].abs().max() > 1e-3
    for more in ({"use_cache": False}, {"attention_mask": torch.ones_like(ids)}):
        check_equal({"logits": run(model, ids, position_ids=place, **more).logits}, {"logits": want}, f"{mixer} {more}")
