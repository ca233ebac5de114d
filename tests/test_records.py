"""Records: every line of a file is a record or a bad line, and nothing of it is lost."""

from __future__ import annotations

import csv
import io
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import InputError
from loading.lines import readable
from loading.records import read_records
from loading.vectors import vectors_of_array, vectors_of_values


def records_of(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return read_records(path)


def bad_of(records):
    return [(bad.line_number, bad.reason) for bad in records.bad]


def test_jsonl_lines_end_at_newlines_alone(tmp_path):
    text = "one\u2028line\u0085still\x0bthe same"
    records = records_of(tmp_path, "a.jsonl", json.dumps({"text": text}, ensure_ascii=False).encode() + b"\r\n{}")
    assert records.rows == [{"text": text}, {}]
    assert records.line_numbers == [1, 2]


def test_jsonl_lines_that_are_no_records_keep_their_number_reason_and_original(tmp_path):
    lines = [
        b'{"id": 1}', b"", b"   ", b'{"id": 2', b"[1, 2]", b'{"text": "caf\xe9 \\\\ \xc3\xa9"}', b'{"text": "\\ud83d"}',
        b"[" * 100_000, b'{"id": ' + b"9" * 5000 + b"}", b'{"text": "\\ud83d\\ude00"}',
    ]  # fmt: skip
    records = records_of(tmp_path, "a.jsonl", b"\n".join(lines))
    assert records.line_numbers == [1, 10]
    assert records.rows[1] == {"text": "\U0001f600"}
    assert bad_of(records) == [
        (2, "empty"), (3, "empty"), (4, "invalid"), (5, "invalid"), (6, "undecodable"), (7, "undecodable"),
        (8, "invalid"), (9, "invalid"),
    ]  # fmt: skip
    assert records.bad[2].original == '{"id": 2'
    assert records.bad[3].detail == "got a JSON list, want an object"
    assert records.bad[4].original == r'{"text": "caf\xe9 \\\\ é"}'


def test_a_byte_order_mark_belongs_to_no_record(tmp_path):
    assert records_of(tmp_path, "a.jsonl", b'\xef\xbb\xbf{"a": 1}\n').rows == [{"a": 1}]
    assert records_of(tmp_path, "a.csv", b"\xef\xbb\xbfa,b\n1,2\n").rows == [{"a": "1", "b": "2"}]
    assert records_of(tmp_path, "a.tsv", b"\xef\xbb\xbf7\tword\n").rows == [{"query_id": "7", "text": "word"}]


@given(st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"")))
@settings(max_examples=100, deadline=None)
def test_nothing_of_an_undecodable_line_is_lost(line):
    text = readable(line)
    try:
        assert text == line.decode()
    except UnicodeDecodeError:
        back = re.sub(
            rb"\\(\\|x[0-9a-f]{2})",
            lambda found: b"\\" if found[1] == b"\\" else bytes([int(found[1][1:], 16)]),
            text.encode(),
        )
        assert back == line


@given(
    st.lists(
        st.dictionaries(
            st.text(st.characters(codec="utf-8"), min_size=1, max_size=5),
            st.none() | st.integers() | st.text(st.characters(codec="utf-8")) | st.lists(st.booleans()),
            min_size=1,
        ),
        max_size=5,
    ),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_jsonl_gives_back_what_json_wrote(tmp_path_factory, rows, escaped):
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    path.write_bytes("".join(json.dumps(row, ensure_ascii=escaped) + "\n" for row in rows).encode())
    records = read_records(path)
    assert (records.rows, records.bad) == (rows, [])
    assert records.line_numbers == list(range(1, len(rows) + 1))


def test_a_csv_row_has_the_number_of_its_first_line(tmp_path):
    content = b'id,text\n1,"two\nlines"\n\n2,plain\n3\n4,"quote ""in"" it"\n,\n5,\n'
    records = records_of(tmp_path, "a.csv", content)
    assert records.rows == [
        {"id": "1", "text": "two\nlines"},
        {"id": "2", "text": "plain"},
        {"id": "4", "text": 'quote "in" it'},
        {"id": "5", "text": None},
    ]
    assert records.line_numbers == [2, 5, 7, 9]
    assert [(bad.line_number, bad.reason, bad.original) for bad in records.bad] == [
        (4, "empty", ""), (6, "invalid", "3"), (8, "empty", ",")
    ]  # fmt: skip


def test_undecodable_and_broken_csv_rows_are_named_and_the_rest_is_read(tmp_path):
    records = records_of(tmp_path, "a.csv", b'id,text\n1,"caf\xe9\nbar"\n2,"x"y\n3,good\n4,"never closed\n5,lost\n')
    assert records.rows == [{"id": "3", "text": "good"}, {"id": "5", "text": "lost"}]
    assert [(bad.line_number, bad.reason, bad.original) for bad in records.bad] == [
        (2, "undecodable", '1,"caf\\xe9\nbar"'),
        (4, "invalid", '2,"x"y'),
        (6, "invalid", '4,"never closed'),
    ]


@given(st.lists(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\r")), min_size=2, max_size=2)))
@settings(max_examples=60, deadline=None)
def test_csv_gives_back_what_the_csv_module_wrote(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    buffer = io.StringIO()
    csv.writer(buffer, quoting=csv.QUOTE_ALL).writerows([["left", "right"], *rows])
    path.write_bytes(buffer.getvalue().encode())
    records = read_records(path)
    expected = [{"left": left or None, "right": right or None} for left, right in rows if left or right]
    assert records.rows == expected
    assert len(records.rows) + len(records.bad) == len(rows)


@pytest.mark.parametrize("later", [b"", b'180,"quoted, text"\n181,"two\nlines"\n'])
def test_an_unclosed_quote_in_csv_costs_its_own_line_alone(tmp_path, later):
    lines = [b"%d,text %d\n" % (number, number) for number in range(2, 180)]
    lines[148] = b'150,"text 150\n'
    records = records_of(tmp_path, "a.csv", b"id,text\n" + b"".join(lines) + later + b"182,last\n")
    assert [(bad.line_number, bad.reason, bad.original) for bad in records.bad] == [(150, "invalid", '150,"text 150')]
    assert len(records.rows) == 177 + 1 + (2 if later else 0)
    assert records.rows[148] == {"id": "151", "text": "text 151"}
    assert records.line_numbers[-1] == (183 if later else 180)
    if later:
        assert [row["text"] for row in records.rows[-3:]] == ["quoted, text", "two\nlines", "last"]


def test_a_long_text_fits_into_a_csv_field(tmp_path):
    assert len(records_of(tmp_path, "a.csv", b"text\n" + b"x" * 500_000).rows[0]["text"]) == 500_000


@pytest.mark.parametrize("header", [b"a,a\n1,2\n", b"a,\xff\n1,2\n", b'a,"b\n1,2\n'])
def test_a_csv_header_that_names_nothing_is_refused(tmp_path, header):
    with pytest.raises(InputError, match="line 1: the header is not usable"):
        records_of(tmp_path, "a.csv", header)


def test_tsv_is_an_id_and_a_text(tmp_path):
    records = records_of(tmp_path, "a.tsv", b"7\twhat is x\r\n\n8\tcaf\xe9\n9\ta\tb\n10\n11\t\n")
    assert records.rows == [{"query_id": "7", "text": "what is x"}, {"query_id": "11", "text": None}]
    assert bad_of(records) == [(2, "empty"), (3, "undecodable"), (4, "invalid"), (5, "invalid")]


def test_parquet_rows_are_numbered_and_vectors_stay_in_arrow(tmp_path):
    folder = tmp_path / "lang=en"  # the name of a folder is no column
    folder.mkdir()
    vectors = pa.array([[1.0, 2.0], None], pa.list_(pa.float32()))
    pq.write_table(pa.table({"text": ["a", None], "embedding": vectors}), folder / "a.parquet")
    records = read_records(folder / "a.parquet")
    assert records.rows == [{"text": "a"}, {"text": None}]
    assert records.line_numbers == [1, 2]
    assert records.vectors.equals(vectors)
    assert json.loads(records.original(0)) == {"text": "a", "embedding": [1.0, 2.0]}


def test_undecodable_strings_in_parquet_are_named(tmp_path):
    broken = pa.Array.from_buffers(pa.string(), 3, pa.array([b"good", b"caf\xe9", b"fine"], pa.binary()).buffers())
    table = pa.table({"id": [1, 2, 3], "text": broken, "embedding": [[1.0], [2.0], [3.0]]})
    pq.write_table(table, tmp_path / "a.parquet")
    records = read_records(tmp_path / "a.parquet")
    assert [row["id"] for row in records.rows] == [1, 3]
    assert records.vectors.to_pylist() == [[1.0], [3.0]]
    assert [(bad.line_number, bad.reason) for bad in records.bad] == [(2, "undecodable")]
    assert json.loads(records.bad[0].original) == {"id": 2, "text": r"caf\xe9"}


@pytest.mark.parametrize(
    ("kind", "number", "text"),
    [
        (pa.timestamp("s"), 1, "1970-01-01T00:00:01"),
        (pa.timestamp("ms"), 1, "1970-01-01T00:00:00.001000"),
        (pa.timestamp("ns"), 1, "1970-01-01T00:00:00.000000001"),
        (pa.timestamp("ns"), 1_001_000, "1970-01-01T00:00:00.001001"),
        (pa.timestamp("us", "UTC"), 0, "1970-01-01T00:00:00+00:00"),
        (pa.timestamp("ms", "Europe/Berlin"), 1, "1970-01-01T01:00:00.001000+01:00"),
        (pa.timestamp("us", "-08:30"), 1, "1969-12-31T15:30:00.000001-08:30"),
        (pa.timestamp("s", "Mars/Olympus"), 1, "1970-01-01T00:00:01+00:00"),
        (pa.timestamp("s"), 253_402_300_800, "10000-01-01T00:00:00"),
        (pa.timestamp("ms"), 2**62, "<value out of range: 4611686018427387904>"),
        (pa.date32(), 19_000, "2022-01-08"),
        (pa.time64("ns"), 1_001, "00:00:00.000001001"),
        (pa.time64("us"), 1_000_000, "00:00:01"),
        (pa.duration("ns"), 86_401, "86401"),
    ],
)
def test_times_in_parquet_become_text_also_where_python_cannot_hold_them(tmp_path, kind, number, text):
    storage = pa.int32() if kind == pa.date32() else pa.int64()
    values = pa.array([number, None], storage).cast(kind)
    pq.write_table(pa.table({"when": values}), tmp_path / "a.parquet")
    assert read_records(tmp_path / "a.parquet").rows == [{"when": text}, {"when": None}]


def test_a_parquet_column_that_python_cannot_hold_is_named(tmp_path):
    nested = pa.array([[1]], pa.list_(pa.timestamp("ns")))
    pq.write_table(pa.table({"id": [1], "seen_at": nested}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"column seen_at: its values cannot be read"):
        read_records(tmp_path / "a.parquet")


def test_a_json_object_with_a_repeated_key_is_no_record(tmp_path):
    lines = b'{"text": "q", "filters": {"a": 1, "a": 2}}\n{"a": {"a": 1}}\n{"a": 1, "a": 1}\n'
    assert bad_of(records_of(tmp_path, "a.jsonl", lines)) == [(1, "invalid"), (3, "invalid")]


def test_a_file_that_is_not_what_its_suffix_says_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        records_of(tmp_path, "a.parquet", b"PAR1 and nothing else")
    with pytest.raises(InputError, match=r"the kind of file is not known: got \.xlsx"):
        records_of(tmp_path, "a.xlsx", b"")
    with pytest.raises(InputError, match="cannot be read: got No such file"):
        read_records(tmp_path / "nothing.jsonl")


def test_vectors_that_do_not_fit_are_named_and_the_others_kept():
    given_vectors = [
        [1, 2],
        None,
        [1.0, 2.0, 3.0],
        [0, 0],
        [float("nan"), 1],
        "[3, 4]",
        "text",
        [True, 1],
        [3.0, 1e300],
    ]
    loaded = vectors_of_values(given_vectors)
    assert loaded.matrix.tolist() == [[1, 2], [0, 0], [0, 0], [0, 0], [0, 0], [3, 4], [0, 0], [0, 0], [3, 1e300]]
    assert loaded.problems == {
        1: "has no vector",
        2: "its vector has another width: got 3, want 2",
        3: "its vector is zero",
        4: "its vector holds a NaN or an infinity",
        6: "its vector is not a list of numbers",
        7: "its vector is not a list of numbers",
    }


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32()), pa.list_(pa.float64()), pa.large_list(pa.float16()), pa.list_(pa.float32(), 2)]
)
def test_vectors_of_any_arrow_list_are_read_alike(kind):
    values = [[1.0, 2.0], None, [0.5, -4.0]]
    if kind == pa.large_list(pa.float16()):
        array = pa.array([None if v is None else [np.float16(x) for x in v] for v in values], kind)
    else:
        array = pa.array(values, kind)
    loaded = vectors_of_array(array.slice(0))
    assert loaded.matrix.tolist() == [[1, 2], [0, 0], [0.5, -4]]
    assert loaded.problems == {1: "has no vector"}
    assert vectors_of_array(array.slice(2)).matrix.tolist() == [[0.5, -4]]


def test_a_column_that_holds_no_vectors_is_named_row_by_row():
    assert vectors_of_array(pa.array(["a", "b"])).problems == dict.fromkeys(
        [0, 1], "its vector is not a list of numbers"
    )
    null_inside = vectors_of_array(pa.array([[1.0, None], [1.0, 2.0]], pa.list_(pa.float32())))
    assert null_inside.problems == {0: "its vector holds a NaN or an infinity"}
