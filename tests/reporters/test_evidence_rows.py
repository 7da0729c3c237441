"""Lists of records as tables."""

from __future__ import annotations

from moedoctor.reporters.evidence_rows import evidence_tables, is_records, lines, without_records

ROWS = [
    {"shape": "128x128", "ours_us": 1.4567, "ours_us_p20": 1.45, "ours_us_p80": 1.46, "correct": True},
    {"shape": "8192x128", "correct": False},
]


def test_a_median_stands_with_its_percentiles() -> None:
    (table,) = evidence_tables({"rows": ROWS, "top_k": 8})
    assert table.header == ("shape", "ours us", "correct")
    assert table.rows == (("128x128", "1.457 (1.45 to 1.46)", "true"), ("8192x128", "", "false"))
    assert list(lines(table))[1:] == [
        "128x128   1.457 (1.45 to 1.46)  true",
        "8192x128                        false",
    ]


def test_a_percentile_without_its_median_keeps_its_column() -> None:
    assert evidence_tables({"rows": [{"ours_us_p20": 1.0}]})[0].header == ("ours us p20",)


def test_the_rest_stays_for_a_line_of_text() -> None:
    assert without_records({"rows": ROWS, "top_k": 8}) == {"top_k": 8}
    for value in ([], [1], {"a": {}}, "text", [{"a": 1}, 2]):
        assert not is_records(value)
