"""The training stream: resumable anywhere, mixed by weight, shared by ranks, and apart from what is held out."""

import io
import random
import re
from pathlib import Path

import pytest
import torch
from data_case import KINDS, documents, equal, make, stream, text, tokenizer

from hybridize.errors import CheckpointError, DataError, UsageError
from hybridize.priming.stream import open_stream


def saved(state):
    """The state as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", [*KINDS, "mixture"])
def test_resumes_bit_for_bit_anywhere(tmp_path, kind) -> None:
    data = [make(kind, tmp_path)] if kind != "mixture" else mixture(tmp_path)
    one, _ = stream(*data)
    states, batches = [], []
    for _ in range(90):  # several epochs
        states.append(saved(one.state()))
        batches.append(one.batch())
    assert len({tuple(batch.ids.flatten().tolist()) for batch in batches}) > 45, "batches must differ"
    pick = random.Random(kind)
    for at in [0, 1, *pick.sample(range(2, 88), 5)]:
        again, _ = stream(*data)
        for _ in range(pick.randrange(3)):
            again.batch()  # where it was before must not matter
        again.load_state(states[at])
        assert all(equal(again.batch(), batch) for batch in batches[at : at + 9]), at
    again.load_state(states[3])
    while again.counts != one.counts:
        again.batch()
    assert again.counts["tokens"] > 1000


def mixture(folder) -> list[str]:
    return [f"{make('folder', folder, 80)}=2", f"{make('chat', folder)}=0.7"]


def test_a_state_of_other_data_is_refused(tmp_path) -> None:
    spec = make("jsonl", tmp_path)
    state = stream(spec)[0].state()
    with pytest.raises(CheckpointError, match="without --resume"):
        stream(spec, context=32)[0].load_state(state)
    with Path(spec).open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(CheckpointError, match=r"jsonl.* has changed"):
        stream(spec)[0].load_state(state)


def test_every_token_comes_once_an_epoch_and_then_again(tmp_path) -> None:
    spec = make("folder", tmp_path)
    told = []
    (tmp_path / "held.txt").write_text("something else to measure on, " * 9)
    one, _ = stream(spec, held_out=str(tmp_path / "held.txt"), warn=told.append)
    encode = tokenizer()
    total = sum(len(encode(text(i))["input_ids"]) for i in range(40))
    seen: dict[int, int] = {}
    rows = total // 64
    for _ in range(rows // 2):
        for token in one.batch().ids.flatten().tolist():
            seen[token] = seen.get(token, 0) + 1
    assert not told, "a whole epoch without a warning"
    want: dict[int, int] = {}
    for i in range(40):
        for token in encode(text(i))["input_ids"]:
            want[token] = want.get(token, 0) + 1
    assert all(count <= want[token] for token, count in seen.items())
    assert sum(want.values()) - sum(seen.values()) < 3 * 64  # what is left in the pool
    assert one.counts["dropped_tokens"] == 0 and one.counts["tokens"] == total
    for _ in range(3 * rows):
        one.batch()
    assert len(told) == 1 and "read again" in told[0] and f"{total:,} tokens" in told[0]


def test_rows_are_shuffled_by_seed_and_again_in_each_epoch(tmp_path) -> None:
    spec = make("jsonl", tmp_path)
    first = {seed: [documents(stream(spec, seed=seed)[0].batch())[0]] for seed in (0, 1)}
    assert first[0] != first[1]
    assert equal(stream(spec, seed=1)[0].batch(), stream(spec, seed=1)[0].batch())
    feed = stream(spec)[0].readers[0].feed
    orders = []
    for epoch in range(2):
        feed.load_state({"epoch": epoch, "position": 0})
        orders.append(feed.order.tolist())
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]


def test_weights_are_shares_of_the_tokens(tmp_path) -> None:
    """However long the documents are: text of 300 bytes against conversations of 100."""
    one, _ = stream(*mixture(tmp_path))
    mine = other = 0
    for _ in range(200):
        for ids in documents(one.batch()):
            if ids[0] == 256 or 256 in ids[1:]:
                other += len(ids)
            else:
                mine += len(ids)
    share = 2 / 2.7
    assert mine / (mine + other) == pytest.approx(share, abs=0.03)  # padding behind conversations counts as text here
    assert one.given[0] / sum(one.given) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_rows_share_no_document_with_training(tmp_path, kind) -> None:
    spec = make(kind, tmp_path, 60)
    one, held = stream(spec, held_out_tokens=512)
    assert 1 <= len(held.ids) <= 8 and held.targets.any()
    measured = {number for ids in documents(held) for number in numbers(ids)}
    trained = {number for _ in range(150) for ids in documents(one.batch()) for number in numbers(ids)}
    assert measured and len(trained) > 45
    assert not measured & trained
    assert equal(held, stream(spec, held_out_tokens=512, seed=5)[1]), "the same for every seed"


def test_results_are_chosen_on_other_rows_than_they_are_stated_on(tmp_path) -> None:
    settings = {"vocabulary": 262, "context": 64, "batch_rows": 2, "seed": 0, "held_out_tokens": 512}
    _, held = open_stream([make("jsonl", tmp_path, 400)], tokenizer(), **settings)
    assert len(held.stated.ids) == 8 and len(held.choosing.ids) == 2
    rows = [tuple(row) for row in torch.cat([held.stated.ids, held.choosing.ids]).tolist()]
    assert len(set(rows)) == 10
    (tmp_path / "scarce.txt").write_text("x" * 2000)
    _, held = open_stream([str(tmp_path / "scarce.txt")], tokenizer(), **settings)
    assert len(held.stated.ids) == len(held.choosing.ids) == 1
    (tmp_path / "scarce.txt").write_text("x" * 1000)
    assert open_stream([str(tmp_path / "scarce.txt")], tokenizer(), **settings)[1].choosing is None


def numbers(ids: list[int]) -> set[str]:
    """The numbers of the test documents in a piece: what stands after w, and after Question or Answer."""
    return set(re.findall(r"(?:\bw|Question |Answer )(\d+)[-.]", tokenizer().decode(ids)))


def test_a_single_text_is_cut_and_its_end_held_out(tmp_path) -> None:
    path = tmp_path / "one.txt"
    path.write_text(" ".join(f"w{i}-" for i in range(1000)))
    one, held = stream(str(path), held_out_tokens=128)
    measured = {int(n) for ids in documents(held) for n in numbers(ids)}
    trained = {int(n) for _ in range(60) for ids in documents(one.batch()) for n in numbers(ids)}
    assert min(measured) >= 940 and max(trained) <= 960 and len(trained) > 850
    assert len(measured & trained) <= 1  # a word may be cut in two at the border


def test_held_out_text_is_skipped_in_training(tmp_path) -> None:
    spec = make("jsonl", tmp_path)
    half = tmp_path / "half.jsonl"
    half.write_text("".join(Path(spec).read_text().splitlines(keepends=True)[:20]))
    one, _ = stream(spec, held_out=str(half), held_out_tokens=100_000)
    trained = {int(n) for _ in range(60) for ids in documents(one.batch()) for n in numbers(ids)}
    assert trained == set(range(20, 40)) and one.counts["also_held_out"] >= 20
    with pytest.raises(DataError, match=r"Every document of .* is also held out"):
        stream(str(half), held_out=spec, held_out_tokens=100_000)


def test_the_builtin_text_has_its_own_held_out_part() -> None:
    one, held = stream("builtin", context=128, batch_rows=4, held_out_tokens=2048)
    assert held.ids.shape == (16, 128) and one.batch().ids.shape == (4, 128)


def test_an_impossible_mixture_is_refused_at_once(tmp_path) -> None:
    spec = make("folder", tmp_path)
    for wrong, message in [
        ([f"{spec}=0"], "weight above 0"),
        ([f"{spec}=-1", "builtin"], "weight above 0"),
        ([f"{spec}=many"], "weight above 0"),
        (["=2"], "weight above 0"),
        ([f"{spec}=2", f"{spec}=1"], "twice"),
        ([], "no --data"),
    ]:
        with pytest.raises(UsageError, match=message):
            stream(*wrong)


def test_a_text_that_has_a_weight_in_its_name(tmp_path) -> None:
    path = tmp_path / "two=3.txt"
    path.write_text(" ".join(map(str, range(999))))
    assert stream(str(path))[0].names == [str(path)]
