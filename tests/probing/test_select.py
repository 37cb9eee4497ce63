"""Which layers are selected: constraints, counts, combined scores, and what prime makes of them."""

import pytest
from probing_case import made_up_report

from hybridize.errors import UsageError
from hybridize.hybrid.plan import LayerPlan
from hybridize.probing.select import evenly_spaced, lowest, mean_ranks


def test_lowest_leaves_out_what_is_kept():
    assert lowest([3.0, 1.0, 2.0, 1.0], 2, []) == [1, 3]
    assert lowest([3.0, 1.0, 2.0, 1.0], 2, [1]) == [2, 3]
    assert lowest([1.0, 1.0, 1.0], 2, []) == [0, 1]


def test_evenly_spaced_as_a_plan_is_unless_layers_are_kept():
    for layers in (4, 7, 30):
        for count in range(1, layers + 1):
            plan = LayerPlan.evenly_spaced(layers, count / layers, "gka")
            assert evenly_spaced(layers, count, []) == plan.layers and len(plan.layers) == count
    assert evenly_spaced(6, 2, [5, 0]) == [2, 4]
    assert evenly_spaced(6, 4, [5, 0]) == [1, 2, 3, 4]


def test_mean_ranks_share_ties():
    assert mean_ranks([[0.3, 0.1, 0.2]]) == [3, 1, 2]
    assert mean_ranks([[5.0, 5.0, 1.0, 5.0]]) == [3, 3, 1, 3]
    assert mean_ranks([[0.3, 0.1, 0.2], [100.0, 200.0, 200.0]]) == [2, 1.75, 2.25]


def test_a_combined_score_is_the_mean_of_ranks():
    report = made_up_report("swa+hankel")
    swa, hankel = report.scores("swa"), report.scores("hankel")
    assert report.scores("swa+hankel") == [layer["score"] for layer in report.layers] == mean_ranks([swa, hankel])
    assert report.select(by="swa").layers != report.select(by="hankel").layers == [3, 4, 5]
    three = report.scores("swa@20 + hankel + retrieval.accuracy")
    assert three == mean_ranks([report.scores("swa@20"), hankel, report.scores("retrieval.accuracy")])


def test_select_by_ratio_or_count_and_what_is_kept():
    report = made_up_report(keep=[3])
    assert report.select().layers == [0, 2, 5] and report.select(keep=[]).layers == [2, 3, 5]
    assert report.select(count=1).layers == [2] and report.select(1 / 3).layers == [2, 5]
    assert report.select(count=6, keep=[]).layers == list(range(6))
    assert report.select(count=1, by="hankel", kind="gdn", keep=[5]).kinds[4] == "gdn"
    for options, part in (
        ({"ratio": 0.5, "count": 3}, "--ratio and --count both"),
        ({"count": 0}, "--count 0: the model has 6 layers; convert 1 to 6"),
        ({"count": 7}, "--count 7: the model has 6 layers"),
        ({"count": 6}, "--count 6 converts 6 of 6 layers, but --keep leaves 5"),
        ({"ratio": 1.0}, "--ratio 1.0 converts 6 of 6 layers, but --keep leaves 5"),
        ({"keep": [6]}, "--keep 6: there is no such layer; the model has layers 0 to 5"),
        ({"keep": [-1]}, "--keep -1: there is no such layer"),
        ({"keep": [1, 1]}, "--keep names layer 1 twice"),
        ({"by": "swa+beauty"}, "no score 'beauty'"),
    ):
        with pytest.raises(UsageError, match=part.replace("+", r"\+")):
            report.select(**options)


def test_prime_honours_what_the_probe_kept(probe, command, place):
    code, report, err = probe("--count", "2", "--keep", "3,0", "--method", "swa,hankel", "--by", "swa+hankel")
    assert code == 0, err
    selected = report["selected"]
    assert (selected["layers"], selected["keep"], selected["ratio"]) == ([1, 2], [0, 3], 0.5)
    assert selected["uniform"]["layers"] == [1, 2] and selected["uniform"]["score"] == selected["score"]
    prime = ["prime", place / "source", "--dry-run", "--context", 32, "--device", "cpu"]
    code, plan, err = command(*prime)
    assert code == 0 and plan["converted"] == [1, 2] and "selected by swa+hankel" in err
    code, plan, err = command(*prime, "--ratio", "0.25")
    assert plan["converted"] == [min((1, 2), key=lambda n: report["layers"][n]["score"])]
    code, _, err = command(*prime, "--ratio", "0.75")
    assert code == 2 and "--ratio 0.75 converts 3 of 4 layers" in err and "told to keep 0, 3" in err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--ratio", "0.5", "--count", "2"], "--ratio and --count both"),
        (["--count", "9"], "the model has 4 layers"),
        (["--keep", "0,x"], "no list of numbers such as 0,1,29"),
        (["--keep", "4"], "there is no such layer"),
        (["--keep", "0,1,2"], "--ratio 0.5 converts 2 of 4 layers, but --keep leaves 1"),
        (["--by", "swa+"], "no score ''"),
        (["--by", "swa+hankel"], "hankel is not measured"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refuses_what_cannot_be(probe, tmp_path, words, part):
    code, report, err = probe(*words)
    assert (code, report) == (2, None) and part in err, err
    assert not (tmp_path / "runs").exists()
