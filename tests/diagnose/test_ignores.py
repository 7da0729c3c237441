"""`--ignore` and `--fail-on`: a reason is needed, a date ends it, and a typing error is named."""

from datetime import date

import pytest

from moedoctor.diagnose.ignores import Ignore, IgnoreError, fails, list_idle, read_ignore, sort_out

DAY = date(2026, 11, 28)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MD016=MARLIN is set", Ignore("MD016", "MARLIN is set", None)),
        ("MD016=MARLIN is set until 2027-01-31", Ignore("MD016", "MARLIN is set", "2027-01-31")),
        ("scale_zero=a = b, until 2027-01-31", Ignore("scale_zero", "a = b", "2027-01-31")),
        ("MD016=we wait until vLLM mends it", Ignore("MD016", "we wait until vLLM mends it", None)),
    ],
)
def test_a_rule_is_read(text: str, expected: Ignore) -> None:
    assert read_ignore(text) == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("MD016", "expected ID=REASON"),
        ("MD016=", "expected ID=REASON"),
        ("=reason", "expected ID=REASON"),
        ("MD016=until 2027-01-31", "expected ID=REASON"),
        ("MD016=reason until 2027-02-30", "expected a date such as 2027-01-31"),
        ("MD016=reason until 31.1.2027", "expected a date such as 2027-01-31"),
        ("MD061=reason", "expected one of"),
    ],
)
def test_a_wrong_rule_is_refused(text: str, part: str) -> None:
    with pytest.raises(IgnoreError, match=part):
        read_ignore(text, known=("MD016", "scale_zero"))


def test_the_last_day_counts_and_the_next_one_does_not() -> None:
    rules = [Ignore("A", "why", "2026-11-28"), Ignore("B", "why", "2026-11-27"), Ignore("C", "why", None)]
    kept, ignored = sort_out(["a", "b"], rules, lambda text: ([text.upper()], text.upper()), DAY)
    assert kept == ("b",)
    (rule,) = ignored
    assert (rule.id, rule.title, rule.reason, rule.until) == ("A", "A", "why", "2026-11-28")
    assert list_idle(rules, ignored, DAY) == [
        "--ignore B: ended with 2026-11-27, so that its findings count again",
        "--ignore C: nothing that was found has this id",
    ]


def test_the_words_of_a_title_name_a_problem_without_an_id() -> None:
    def name(title: str) -> tuple[list[str], str]:
        return [], title

    rules = [Ignore("flashinfer-cubin", "why", None), Ignore("the nvidia driver", "no GPU here", None)]
    found = ["flashinfer-cubin 0.6.4 with x", "flashinfer-cubins are gone", "the NVIDIA driver is silent"]
    assert sort_out(found, rules, name, DAY)[0] == ("flashinfer-cubins are gone",)


@pytest.mark.parametrize(
    ("fail_on", "expected"),
    [
        ("error", [True, False, False]),
        ("warning", [True, True, False]),
        ("note", [True, True, True]),
        ("never", [False, False, False]),
    ],
)
def test_a_severity_and_worse_ones_fail(fail_on: str, expected: list[bool]) -> None:
    assert [fails(severity, fail_on) for severity in ("error", "warning", "note")] == expected
