"""Streamed datasets, from local files through the library's own builders: order, resuming, what is held out."""

import random

import pytest
from data_case import chat, documents, equal, stream, text, tokenizer

from hybridize.errors import CheckpointError, DataError

datasets = pytest.importorskip("datasets", reason="datasets of the Hub need the library datasets, of the extra data")
pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow, of the extra data")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Puts a dataset owner/name on a Hub that is a folder: examples in several files, in Parquet or JSON."""
    real = datasets.load_dataset
    files: dict = {}
    asked = []

    def put(examples, kind="parquet", split="train", shards=3, config=None):
        paths = []
        for shard in range(shards):
            mine = examples[shard * len(examples) // shards : (shard + 1) * len(examples) // shards]
            path = tmp_path / f"{split}-{shard}.{kind}"
            if kind == "parquet":
                parquet.write_table(pyarrow.Table.from_pylist(mine), path, row_group_size=5)
            else:
                datasets.Dataset.from_list(mine).to_json(path)
            paths.append(str(path))
        files[(config, split)] = kind, paths

    def load(name, config=None, split=None, streaming=False):
        asked.append((name, config, split))
        assert streaming
        if (config, split) not in files:
            raise ValueError(f'Bad split: {split}.\nAvailable splits: ["train"]')
        kind, paths = files[(config, split)]
        return real(kind, data_files={split: paths}, split=split, streaming=True, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load)
    put.asked = asked
    return put


def some(count=60):
    return [{"text": text(i), "id": i} for i in range(count)]


@pytest.mark.parametrize("kind", ["parquet", "json"])
@pytest.mark.parametrize("buffer", [1, 7, 1000])
def test_resumes_bit_for_bit_anywhere(hub, kind, buffer) -> None:
    hub(some(), kind)
    one, _ = stream("owner/name", buffer=buffer)
    states, batches = [], []
    for _ in range(80):
        states.append(one.state())
        batches.append(one.batch())
    pick = random.Random(buffer)
    for at in [0, *pick.sample(range(1, 75), 5)]:
        again, _ = stream("owner/name", buffer=buffer)
        again.load_state(states[at])
        assert all(equal(again.batch(), batch) for batch in batches[at : at + 5]), at


def test_a_buffer_shuffles_and_the_seed_says_how(hub) -> None:
    hub(some())
    feeds = [
        stream("owner/name", buffer=buffer, seed=seed)[0].readers[0].feed for buffer, seed in [(1, 0), (9, 0), (9, 1)]
    ]
    orders = []
    for feed in feeds:
        feed.load_state({"epoch": 0, "number": 0, "dataset": None, "position": 0})
        orders.append([int(feed.next().name.rpartition(":")[2]) for _ in range(50)])
    assert orders[0] == sorted(orders[0]) and orders[1] != orders[2] and orders[1] != orders[0]
    assert all(abs(place - number) < 12 for place, number in enumerate(orders[1]))


def test_every_document_once_an_epoch_with_one_warning(hub) -> None:
    hub(some())
    told = []
    one, _ = stream("owner/name", warn=told.append, buffer=11)
    feed = one.readers[0].feed
    assert not told
    for _ in range(200):
        one.batch()
    assert len(told) == 1 and "owner/name" in told[0] and feed.epoch > 1
    assert one.counts["tokens"] > 200 * 128


def test_held_out_documents_are_never_trained_on(hub) -> None:
    hub(some(80))
    one, held = stream("owner/name", held_out_tokens=100_000)
    fast = tokenizer()
    whole = {tuple(fast(text(i))["input_ids"][:20]): i for i in range(80)}
    measured = {whole[key] for ids in documents(held) if (key := tuple(ids[:20])) in whole}
    trained = {whole[key] for _ in range(200) for ids in documents(one.batch()) if (key := tuple(ids[:20])) in whole}
    assert measured and not measured & trained and len(trained) > 60


def test_a_short_dataset_holds_out_its_last_document(hub) -> None:
    hub(some(3), shards=1)
    _, held = stream("owner/name")
    fast = tokenizer()
    assert text(2).startswith(fast.decode(documents(held)[0])[:15])
    hub(some(1), shards=1)
    with pytest.raises(DataError, match=r"nothing can be held out; give --held-out"):
        stream("owner/name")


def test_conversations_configurations_and_splits(hub) -> None:
    hub([{"messages": chat(i, 2)} for i in range(40)], config="talk", split="sft")
    _, held = stream("owner/name:talk:sft", context=256)
    assert "Answer" in tokenizer().decode(held.ids[held.targets])
    assert set(hub.asked) == {("owner/name", "talk", "sft")}
    with pytest.raises(DataError, match=r"owner/name:talk:sft holds conversations.*no chat template"):
        stream("owner/name:talk:sft", template=None)
    with pytest.raises(DataError, match=r"owner/name::test cannot be read \(Bad split: test\. Available"):
        stream("owner/name::test")


def test_other_fields_and_an_empty_dataset(hub) -> None:
    hub([{"words": text(i)} for i in range(40)])
    with pytest.raises(DataError, match=r'dataset owner/name is not an object with a field "text" or "messages"'):
        stream("owner/name")
    state = stream("owner/name", text_field="words")[0].state()
    hub([{"words": text(i + 7)} for i in range(40)])
    with pytest.raises(CheckpointError, match=r"owner/name .*has changed"):
        stream("owner/name", text_field="words")[0].load_state(state)


def test_a_mixture_with_local_data_resumes(hub, tmp_path) -> None:
    hub(some())
    (tmp_path / "mine.txt").write_text(" ".join(map(str, range(2000))))
    data = ["owner/name=2", f"{tmp_path}/mine.txt"]
    one, _ = stream(*data)
    for _ in range(13):
        one.batch()
    again, _ = stream(*data)
    again.load_state(one.state())
    assert all(equal(again.batch(), one.batch()) for _ in range(40))
    assert one.given[0] / sum(one.given) == pytest.approx(2 / 3, abs=0.05)


def test_parquet_files(tmp_path) -> None:
    path = tmp_path / "chat.parquet"
    rows = [chat(i, 2) for i in range(30)] + [None, []]
    parquet.write_table(pyarrow.table({"id": range(32), "messages": rows}), path, row_group_size=4)
    one, held = stream(str(path), context=256)
    assert "Answer" in tokenizer().decode(one.batch().ids[one.batch().targets]) and held.targets.any()
    with pytest.raises(DataError, match=r"has the columns id, messages, but not words"):
        stream(str(path), text_field="words")
    with pytest.raises(DataError, match=r"column id of .* holds int64"):
        stream(str(path), text_field="id")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a readable Parquet file"):
        stream(str(path))
