"""Padding on either side changes nothing at real tokens, and a masked step changes no bit of a state."""

import pytest
import torch
from hybrid_cases import EVERY, WINDOWED, cache_of, check_equal, hybrid, row_states, run, states, tokens

LENGTHS = (40, 33, 20, 5)


def positions(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


def padded(rows, width, side, fill):
    """Rows of tokens as one batch with its mask; every row has its own padding."""
    ids = torch.full((len(rows), width), fill)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(width - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, at], mask[i, at] = row, 1
    return ids, mask


@pytest.mark.parametrize(("case", "mixer"), EVERY)
def test_padding(case, mixer):
    model = hybrid(case, mixer)
    rows = [tokens(1, n, seed=n)[0] for n in LENGTHS]
    more = [tokens(1, n, seed=100 + n)[0] for n in (9, 4, 1, 7)]
    alone = [run(model, row[None]) for row in rows]
    before = [states(cache_of(out), model) for out in alone]
    after = [run(model, m[None], cache_of(out)) for m, out in zip(more, alone, strict=True)]
    for side in ("left", "right"):
        for chosen, width, fill in ((range(4), 40, 0), (range(4), 43, 7), ([1], 40, 0)):
            what = f"{case} {mixer} {side} batch {len(chosen)} width {width}"
            ids, mask = padded([rows[i] for i in chosen], width, side, fill)
            out = run(model, ids, attention_mask=mask, position_ids=positions(mask))
            for b, i in enumerate(chosen):
                got = {"logits": out.logits[b, mask[b].bool()], **row_states(cache_of(out), model, b)}
                check_equal(got, {"logits": alone[i].logits[0], **before[i]}, f"{what} row {i}")
            if side == "right" and case in WINDOWED:
                continue  # the source itself counts padding in the middle as part of its window
            turn, turn_mask = padded([more[i] for i in chosen], 9, "right", fill)
            whole = torch.cat([mask, turn_mask], 1)
            second = run(model, turn, cache_of(out), attention_mask=whole, position_ids=positions(whole)[:, width:])
            for b, i in enumerate(chosen):
                got = {"logits": second.logits[b, turn_mask[b].bool()], **row_states(cache_of(second), model, b)}
                want = {"logits": after[i].logits[0], **states(cache_of(after[i]), model)}
                check_equal(got, want, f"{what} row {i} second turn")


@pytest.mark.parametrize(("case", "mixer"), EVERY)
def test_masked_steps_change_no_bit(case, mixer):
    model = hybrid(case, mixer)
    out = run(model, tokens(3, 20))
    cache = cache_of(out)
    seen = torch.ones(3, 20, dtype=torch.long)
    for width in (1, 7, 70):
        before = {name: x.clone() for name, x in states(cache, model).items()}
        mask = torch.zeros(3, width, dtype=torch.long)
        mask[1, width // 2 :] = 1
        seen = torch.cat([seen, mask], 1)
        run(model, tokens(3, width, seed=width), cache, attention_mask=seen, position_ids=positions(seen)[:, -width:])
        for name, x in states(cache, model).items():
            what = f"{case} {mixer} {name} after {width} masked tokens"
            assert torch.equal(x[[0, 2]], before[name][[0, 2]]), what
            if "sink" not in name:
                assert not torch.equal(x[1], before[name][1]), what


def test_a_row_that_begins_later():
    """A first chunk that is all padding for a row leaves it at the start."""
    model = hybrid("llama", "mixed")
    rows = [tokens(1, n, seed=n)[0] for n in (30, 6)]
    ids, mask = padded(rows, 30, "left", 0)
    place = positions(mask)
    first = run(model, ids[:, :20], attention_mask=mask[:, :20], position_ids=place[:, :20])
    second = run(model, ids[:, 20:], cache_of(first), attention_mask=mask, position_ids=place[:, 20:])
    alone = run(model, rows[1][None])
    got = {"logits": second.logits[1, 4:], **row_states(cache_of(second), model, 1)}
    check_equal(got, {"logits": alone.logits[0], **states(cache_of(alone), model)}, "a row that begins later")
