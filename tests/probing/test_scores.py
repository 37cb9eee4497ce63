"""Task scores from a CSV: the published ones select the published layers, and a wrong file names its row."""

from pathlib import Path

import pytest

from hybridize.cli import main
from hybridize.errors import DataError
from hybridize.probing.scores import read_scores

DATA = Path(__file__).resolve().parent.parent / "data"
GOOD = "layer_num,recall,rag\n-1,0.9,0.8\n0,0.1,0.2\n1,0.9,0.7\n2,0.5,0.5\n"


def spread(text):
    """'1-3, 7' -> [1, 2, 3, 7]"""
    ends = [[int(x) for x in part.split("-")] for part in text.split(", ")]
    return [layer for part in ends for layer in range(part[0], part[-1] + 1)]


@pytest.mark.parametrize(
    ("name", "count", "layers"),
    [
        ("8b", 18, "1-6, 9-11, 26-28, 30-35"),
        ("32b", 32, "2, 3, 7-16, 20, 22-24, 26-29, 32, 33, 35, 36, 39-41, 43, 44, 57, 60, 63"),
    ],
)
def test_published_scores_select_the_published_layers(command, name, count, layers):
    code, report, err = command("probe", "--scores", DATA / f"importance_qwen3-{name}_helmet32k.csv", "--count", count)
    assert code == 0, err
    assert report["selected"]["layers"] == spread(layers) and len(spread(layers)) == count
    assert report["model"] is None and report["buys"] is None


def test_a_person_sees_the_table_without_a_model(tmp_path, capfd):
    path, drawing = tmp_path / "scores.csv", tmp_path / "scores.png"
    path.write_text(GOOD)
    words = ["probe", "--scores", path, "--count", "1", "--workspace", tmp_path / "runs", "--plot", drawing]
    assert main([*map(str, words)]) == 0
    out, _ = capfd.readouterr()
    assert "score: tasks" in out and "1 of 3: 1" in out and "cache" not in out
    assert drawing.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--dry-run"], "leave --dry-run out"),
        (["--resume"], "leave --resume out"),
        (["--by", "swa"], "use tasks, or tasks.NAME"),
        (["--by", ""], "no score ''"),
        (["--by", "tasks.beauty"], "no score 'beauty' among recall, rag, loss"),
        (["--by", "tasks.rag@8"], "no score 'rag@8' among recall, rag, loss"),
        (["--by", "tasks@8"], "not measured at windows"),
        (["--method", "swa", "--window", "64"], "leave --method, --window out"),
        (["--context", "64", "--sequences", "2", "--items", "3"], "leave --context, --sequences, --items out"),
        (["--no-sinks", "--data", "builtin"], "leave --sinks, --data out"),
        (["--device", "cpu", "--dtype", "float32", "--seed", "1"], "leave --device, --dtype, --seed out"),
        (["--revision", "main"], "leave --revision out"),
        (["--select", "greedy"], "leave it out"),
    ],
)
def test_what_scores_cannot_do_is_refused(command, tmp_path, words, part):
    (tmp_path / "scores.csv").write_text(GOOD)
    code, _, err = command("probe", "--scores", tmp_path / "scores.csv", *words)
    assert code == 2 and part in err and not (tmp_path / "runs").exists()


@pytest.fixture
def read(tmp_path):
    def write_and_read(content):
        path = tmp_path / "scores.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_scores(path)

    return write_and_read


def test_rows_and_columns_in_any_order(read):
    scores = read("recall,layer_num,rag\n0.5,2,0.5\n0.1,0,0.2\n0.9,-1,0.8\n0.9,1,0.7\n")
    assert scores == read(GOOD)
    assert scores.tasks == ("recall", "rag") and scores.baseline == (0.9, 0.8)
    assert scores.losses == pytest.approx([0.7, 0.05, 0.35])
    without = read(GOOD.replace("-1,0.9,0.8\n", ""))
    assert without.baseline is None and without.losses == pytest.approx([-0.15, -0.8, -0.5])


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + GOOD.encode(),  # a byte order mark
        GOOD.replace("\n", "\r\n"),
        GOOD.replace("\n", "\n\n"),
        GOOD.replace(",", " , "),
        "\n" + GOOD.rstrip("\n"),
        GOOD.replace("0.5,0.5", '"0.5","0.5"'),
        GOOD.replace("2,0.5", "2,5e-1"),
    ],
    ids=["mark", "crlf", "empty rows", "spaces", "first row empty", "quotes", "exponent"],
)
def test_reads_what_spreadsheets_write(read, content):
    assert read(content) == read(GOOD)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"layer_num,recall\n0,\xff\n", r"scores.csv is not UTF-8 text \(byte 19\)"),
        ("", "scores.csv is empty"),
        ("\n ,\n", "scores.csv is empty"),
        ("layer_num,recall\n", "no row for a layer, only its first row"),
        ("layer_num,recall\n-1,0.5\n", "no row for a layer, only its first row"),
        ("layer_num;recall\n0;0,5\n", "Row 1 of .* is separated by semicolons"),
        ("layer_num\trecall\n0\t0.5\n", "Row 1 of .* is separated by tabs"),
        ("layer,recall\n0,0.5\n", "Row 1 of .* does not name a column layer_num"),
        ("layer_num,,rag\n0,0.5,0.5\n", "Row 1 of .* has no name for column 2"),
        ("layer_num,rag,rag\n0,0.5,0.5\n", "Row 1 of .* names the column rag twice"),
        ("layer_num,loss\n0,0.5\n", "Row 1 of .* names a column loss, which is what"),
        ("layer_num\n0\n", "Row 1 of .* names no task"),
        (GOOD + "3,0.5\n", "Row 6 of .* has 2 columns but the first row names 3"),
        (GOOD + "3,0.5,0.5,0.5\n", "Row 6 of .* has 4 columns"),
        (GOOD + "three,0.5,0.5\n", "Row 6 of .* has 'three' as its layer_num"),
        (GOOD + "3.0,0.5,0.5\n", "Row 6 of .* has '3.0' as its layer_num"),
        (GOOD + "1_0,0.5,0.5\n", "Row 6 of .* has '1_0' as its layer_num"),
        (GOOD + "\u0663,0.5,0.5\n", "Row 6 of .* has '\u0663' as its layer_num"),
        (GOOD + "3,0_5,0.5\n", "Row 6 of .* has '0_5' as the score of recall"),
        (GOOD + "-2,0.5,0.5\n", "Row 6 of .* is for layer -2"),
        (GOOD + "1,0.5,0.5\n", "Row 6 of .* gives layer 1 a second time"),
        (GOOD + "-1,0.5,0.5\n", "Row 6 of .* gives layer -1 a second time"),
        (GOOD + "\n3,nan,0.5\n", "Row 7 of .* has 'nan' as the score of recall"),
        (GOOD + "3,0.5,inf\n", "Row 6 of .* has 'inf' as the score of rag"),
        (GOOD + "3,0.5,\n", "Row 6 of .* has '' as the score of rag"),
        (GOOD + '3,0.5,"0,5"\n', "Row 6 of .* has '0,5' as the score of rag"),
        (GOOD + '3,0.5,"0.5\n', "Row 6 of .* is not CSV"),
        (GOOD + "4,0.5,0.5\n", "no row for layer 3, but one for layer 4"),
        (GOOD + "99999999999,0.5,0.5\n", "no row for layer 3, but one for layer 99999999999"),
    ],
)
def test_names_the_row_that_is_wrong(read, content, part):
    with pytest.raises(DataError, match=part):
        read(content)


def test_a_file_that_is_not_there(tmp_path):
    for path in (tmp_path / "nowhere.csv", tmp_path):
        with pytest.raises(DataError, match="There is no file"):
            read_scores(path)


def test_a_column_may_have_any_name_but_that_of_the_mean(command, tmp_path):
    path = tmp_path / "scores.csv"
    path.write_text(GOOD.replace("recall", "recall@32k").replace("rag", "mean.loss"))
    for column, layer in (("recall@32k", 1), ("mean.loss", 1)):
        code, report, err = command("probe", "--scores", path, "--by", f"tasks.{column}", "--count", 1)
        assert code == 0, err
        assert report["layers"][0]["tasks"][column] in (0.1, 0.2) and report["selected"]["layers"] == [layer]
