"""Rows of CSV files: typed where their columns are known, numbers where a column names a unit, every mistake named at once."""


import pytest
from csv_files import Count, CsvRow, Name, Positive, read_rows, read_table

from soapjax.errors import SoapjaxError


class Published(CsvRow):
    model: Name
    gpus: Count
    full_s: Positive
    delta_s: Positive | None = None


def written(tmp_path, text):
    path = tmp_path / "table.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refused(read, path, *arguments):
    with pytest.raises(SoapjaxError) as e:
        read(path, *arguments)
    return [str(p).removeprefix(f"{path}: ").removeprefix(f"{path}") for p in e.value.problems]


def test_rows_are_typed_and_comments_are_left_out(tmp_path):
    path = written(tmp_path, '\ufeff# made by hand\r\nmodel,note,gpus,full_s,delta_s\r\n\r\n"a, b",x,4,0.5,\r\nc,,2,1e3,2\r\n')
    assert read_rows(path, Published) == [
        Published(model="a, b", gpus=4, full_s=0.5), Published(model="c", gpus=2, full_s=1e3, delta_s=2.0)
    ]  # fmt: skip
    assert [r["note"] for r in read_table(path, ("model", "gpus"))] == ["x", ""]


def test_every_mistake_is_named_with_its_line(tmp_path):
    path = written(tmp_path, "model,gpus,full_s\na,4,0.5\n,4,nan\nb,2.5,-1\nc,0,1e300\n")
    said = refused(read_rows, path, Published)
    assert [s.split(":")[0] for s in said] == [
        "line 3, column model", "line 3, column full_s", "line 4, column gpus", "line 4, column full_s", "line 5, column gpus",
        "line 5, column full_s",
    ]  # fmt: skip
    assert "got '1e300'" in said[-1]
    assert refused(read_table, path)[0].startswith("line 3, column full_s: got 'nan'")


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "no line"),
        ("model,gpus\na,4\n", "columns: got no full_s; expected the columns model, gpus, full_s"),
        ("model,gpus,full_s,gpus\n", "more than once"),
        ("model,gpus,full_s\na,4\n", "line 2: got 2 cells; expected 3"),
        ('model,gpus,full_s\n"a,4,1\n', "unexpected end of data"),
        (b"model,gpus,full_s\n\xff,4,1\n", "byte 18: got bytes that are not UTF-8"),
        ("model,gpus,full_s\n" + "a" * 200_000 + ",4,1\n", "field larger"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, text, words):
    assert words in refused(read_rows, written(tmp_path, text), Published)[0]


def test_of_many_mistakes_some_are_shown(tmp_path):
    said = refused(read_rows, written(tmp_path, "model,gpus,full_s\n" + "a,x,1\n" * 1000), Published)
    assert len(said) == 21 and "980 more failures" in said[-1]
