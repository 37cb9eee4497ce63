"""What a person sees of a probe, and that it agrees with the JSON and with prime."""

import io
import re
import sys

import pytest
import torch
from probing_case import SMALL, kl, made_up_report

from hybridize.cli import main
from hybridize.console import Console, bar
from hybridize.probing.show import shares, show_report
from hybridize.sources import open_source


def shown(capsys, report):
    show_report(Console(), report)
    return capsys.readouterr().out


def cells(line):
    return re.split(r"\s{2,}", line.strip())


def rows(text):
    """The cells of each layer's row."""
    return [cells(line) for line in text.splitlines() if cells(line)[0].isdigit()]


def test_one_row_per_layer_with_all_numbers(capsys):
    report = made_up_report(keep=[3])
    text = shown(capsys, report)
    head = next(line for line in text.splitlines() if "layer" in line)
    numbers = ["score: KL @8", "KL @20", "loss @8", "hankel", "answer loss @8", "answer loss @20", "accuracy @8"]
    assert cells(head) == ["layer", *numbers, "becomes"]
    found = rows(text)
    assert [int(row[0]) for row in found] == list(range(6))
    for number, (_, blocks, *numbers, fate) in enumerate(found):
        lost = kl(number)
        want = [lost, lost / 2, lost - 0.001, 9 - number, 2 * lost, lost, 0.75 - lost]
        assert [float(x) for x in numbers] == pytest.approx(want, abs=5e-5)
        assert len(blocks) == pytest.approx(20 * lost / kl(4), abs=1)
        selected = number in report.select().layers
        assert fate == ("GKA" if selected else "attention (kept)" if number == 3 else "attention")
    assert "loss of the model" in text and "prose 2.500 nats per token" in text and "passkey 75%" in text
    assert "state per sequence" not in text  # it is not known without the model


def test_compares_with_uniform_spacing(capsys):
    report = made_up_report()
    selected = report.to_dict()["selected"]
    assert selected["layers"] == [2, 3, 5] and selected["uniform"]["layers"] == [1, 3, 5]
    assert selected["score"] == pytest.approx(kl(2) + kl(3) + kl(5))
    assert selected["uniform"]["score"] == pytest.approx(kl(1) + kl(3) + kl(5))
    text = shown(capsys, report)
    assert f"{selected['score']:.4g}; of evenly spaced layers {selected['uniform']['score']:.4g}" in text
    assert "3 of 6: 2, 3, 5" in text and selected["pattern"] in text and "rough guide" in text


@pytest.mark.parametrize(("by", "title"), [("swa.loss", "loss @8"), ("swa@20", "KL @20"), ("swa+hankel", "swa+hankel")])
def test_names_the_score_that_selects_and_shows_it_once(capsys, by, title):
    text = shown(capsys, made_up_report(by))
    head = cells(next(line for line in text.splitlines() if "layer" in line))
    assert f"score: {title}" in head and title not in head
    assert re.search(rf"selected by +{re.escape(by)}$", text, re.M)


def test_bars_begin_at_zero_or_at_the_lowest_score():
    assert shares([0.0, 1.0, 4.0]) == [0.0, 0.25, 1.0]
    assert shares([-1.0, 1.0, 0.0]) == [0.0, 1.0, 0.5]
    assert shares([-3.0, -1.0]) == [0.0, 1.0]
    assert shares([0.0, 0.0]) == [0.0, 0.0]
    assert shares([-2.0]) == [0.0] and shares([2.0]) == [1.0]


def test_bars_are_ascii_where_blocks_cannot_be_shown(monkeypatch):
    assert (bar(1.0, 4), bar(0.5, 4), bar(5 / 32, 4), bar(0.0)) == ("████", "██", "▋", "")
    ascii_out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_out)
    assert (bar(1.0, 4), bar(0.5, 4), bar(5 / 32, 4), bar(0.0)) == ("####", "##", "#", "")
    report = made_up_report()
    show_report(Console(), report)  # nothing in it fails to be encoded
    ascii_out.flush()
    assert b"####" in ascii_out.buffer.getvalue()


def test_what_it_buys_is_what_prime_would_make(probe, command, place, capfd, tmp_path):
    code, report, err = probe("--ratio", "0.25", "--layer", "gdn")
    assert code == 0, err
    buys = report["buys"]
    _, plan, _ = command("prime", place / "source", "--dry-run", "--context", 32, "--device", "cpu")
    assert plan["pattern"] == report["selected"]["pattern"]
    assert {name: buys[name] for name in plan["cache"]} == plan["cache"]
    assert buys["dtype"] == str(open_source(place / "source").stored_dtype).removeprefix("torch.")
    assert [at["tokens"] for at in buys["contexts"]] == [32768, 131072, 262144]
    for at in buys["contexts"]:
        assert at["source_bytes"] == at["tokens"] * buys["source_bytes_per_token"]
        grown = at["tokens"] * buys["hybrid_bytes_per_token"]
        assert at["hybrid_bytes"] == grown + buys["state_bytes_per_sequence"]
    words = ["probe", place / "source", *SMALL, "--data", place / "text", "--workspace", tmp_path / "runs"]
    assert main([*map(str, words), "--ratio", "0.25", "--layer", "gdn"]) == 0
    out, _ = capfd.readouterr()
    assert [row[-1] for row in rows(out)] == [
        "GDN" if layer in report["selected"]["layers"] else "attention" for layer in range(4)
    ]
    assert "cache of the source (float32)" in out and "128K" in out and "prose" in out


def test_a_loaded_model_counts_in_its_own_number_format(place):
    import hybridize

    model, tokenizer = hybridize.load(place / "source", dtype="bfloat16", device="cpu")
    text = (place / "text" / "0.txt").read_text()
    report = hybridize.probe(
        model, tokenizer, [text], methods=["swa"], context=64, sequences=1, windows=[8], layer="swa"
    )
    assert model.dtype == torch.bfloat16
    assert (report.buys["dtype"], report.buys["source_bytes_per_token"]) == ("bfloat16", 4 * 2 * 2 * 8 * 2)
