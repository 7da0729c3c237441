"""Grouping and statistics: the order of nodes changes nothing, and the odd one is named."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedoctor.fleet import groups
from moedoctor.fleet.facts import Member

_FACTS = st.dictionaries(
    st.sampled_from(["driver", "vLLM", "FlashInfer", "VLLM_USE_V1", "kernel", "finding MD011"]),
    st.sampled_from(["1", "2", "3"]),
)
_MEMBERS = st.lists(st.tuples(st.sampled_from(["H200", "B200"]), _FACTS), min_size=1, max_size=12).map(
    lambda rows: [Member(f"node-{index}", kind, facts) for index, (kind, facts) in enumerate(rows)]
)


@given(members=_MEMBERS, seed=st.integers(0, 1000))
def test_the_order_of_nodes_changes_nothing(members: list[Member], seed: int) -> None:
    shuffled = list(members)
    random.Random(seed).shuffle(shuffled)
    assert groups.group(shuffled) == groups.group(members)


@given(members=_MEMBERS)
def test_each_node_is_in_one_group_and_equal_nodes_are_together(members: list[Member]) -> None:
    grouping = groups.group(members)
    listed = [name for each in grouping.groups for name in each.nodes]
    assert sorted(listed) == sorted(member.name for member in members)
    room = {name: number for number, each in enumerate(grouping.groups) for name in each.nodes}
    for left in members:
        for right in members:
            if left.kind == right.kind and left.facts == right.facts:
                assert room[left.name] == room[right.name]


@given(
    facts=_FACTS,
    fact=st.sampled_from(["driver", "vLLM", "kernel", "new"]),
    count=st.integers(3, 20),
    odd=st.integers(0),
)
def test_one_odd_node_is_named_with_what_differs(facts, fact, count, odd):
    members = [Member(f"node-{index:02d}", "H200", facts) for index in range(count)]
    name = f"node-{odd % count:02d}"
    members[odd % count] = Member(name, "H200", {**facts, fact: "odd"})
    largest, small = groups.group(members).groups
    assert small.nodes == (name,)
    assert len(largest.nodes) == count - 1
    (difference,) = small.differences
    assert (difference.fact, difference.value, difference.others) == (fact, "odd", facts.get(fact, "none"))
    assert difference.only_here


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_nodes_the_one_with_a_variable_set_is_odd(first: int) -> None:
    members = [Member("node-1", "H200", {"driver": "580"}), Member("node-2", "H200", {"driver": "580"})]
    members[first].facts["VLLM_USE_FLASHINFER_MOE_FP8"] = "1"  # type: ignore[index]
    _, odd = groups.group(members).groups
    assert odd.nodes == (members[first].name,)
    (difference,) = odd.differences
    assert (difference.value, difference.others) == ("1", "none")


def test_a_fact_that_each_node_has_of_its_own_makes_no_groups() -> None:
    facts = [{"VLLM_HOST_IP": f"ip {n}", "driver": "580" if n else "570"} for n in range(8)]
    members = [Member(f"node-{n}", "H200", each) for n, each in enumerate(facts)]
    grouping = groups.group(members)
    assert grouping.individual == {"VLLM_HOST_IP": 8}
    assert [len(each.nodes) for each in grouping.groups] == [7, 1]


def test_ten_thousand_nodes_are_grouped_in_seconds() -> None:
    members = [Member(f"node-{n}", "H200", {"port": str(n), "driver": "580"}) for n in range(10_000)]
    started = time.process_time()
    assert len(groups.group(members).groups) == 1
    assert time.process_time() - started < 10


def test_a_checksum_that_one_node_had_no_time_for_is_not_compared() -> None:
    sums = ["a", "a", "a", "not read in time"]
    members = [Member(f"node-{n}", "H200", {"kernels vllm _C.so": text}) for n, text in enumerate(sums)]
    grouping = groups.group(members)
    assert len(grouping.groups) == 1
    assert grouping.not_read == {"kernels vllm _C.so": 1}


def test_a_rule_judges_equal_gpus_only() -> None:
    members = [Member(f"h{n}", "H200", {"driver": "580"}) for n in range(3)]
    members += [Member(f"b{n}", "B200", {"driver": "590"}) for n in range(2)]
    members += [Member("h9", "H200", {"driver": "570"})]
    first, other_model, odd = groups.group(members).groups
    assert first.kind == "H200"
    assert other_model.differences
    assert other_model.wrong == ()
    assert [difference.fact for difference in odd.wrong] == ["driver"]
    assert (odd.compared_with, odd.wrong[0].others) == (1, "580")


@pytest.mark.parametrize(
    ("fact", "wrong"), [("vLLM", True), ("VLLM_MOE", True), ("kernel", False), ("claim MD001: a text", True)]
)
def test_what_a_rule_calls_wrong(fact: str, wrong: bool) -> None:
    assert (groups.find_rule(fact) is not None) is wrong


def _measured(values: list[float], number: str = "copy_gb_per_second") -> list[Member]:
    return [Member(f"gpu-{index:02d}", "H200", {}, {number: value}) for index, value in enumerate(values)]


@given(
    values=st.lists(st.floats(98, 102), min_size=6, max_size=30),
    factor=st.sampled_from([0.3, 3.0]),
    number=st.sampled_from(["copy_gb_per_second", "layer_us decode"]),
)
def test_one_far_number_is_named_and_judged_by_its_unit(values, factor, number):
    members = _measured([*values, 100 * factor], number)
    found = {outlier.name: outlier for outlier in groups.find_outliers(members)}
    odd = found[members[-1].name]
    assert abs(float(odd.distance)) > groups.MOST_DISTANCE
    assert odd.worse is ((factor < 1) == number.endswith("per_second"))
    assert groups.find_outliers(members[::-1]) == groups.find_outliers(members)


@given(values=st.lists(st.floats(99, 101), min_size=1, max_size=30))
def test_noise_of_one_percent_has_no_outlier(values: list[float]) -> None:
    assert groups.find_outliers(_measured(values)) == ()


def test_three_numbers_have_no_outlier_and_gpus_of_two_models_are_not_compared() -> None:
    assert groups.find_outliers(_measured([100, 100, 1])) == ()
    slow = [Member(f"old-{n}", "A100", {}, {"copy_gb_per_second": 40.0}) for n in range(2)]
    assert groups.find_outliers([*_measured([100, 100, 101, 100]), *slow]) == ()


def test_a_number_beside_zeros_is_an_outlier() -> None:
    (outlier,) = groups.find_outliers(_measured([0, 0, 0, 0, 7], "lost_us"))
    assert outlier.name == "gpu-04"


def test_numbers_of_two_models_are_spread_apart_in_the_order_of_the_reports() -> None:
    rows = [{"time_us tokens=64": time, "copy_gb_per_second": 2000.0} for time in (10.0, 13.0, 11.0)]
    first = [Member(f"gpu-{n}", "H100", {}, row) for n, row in enumerate(rows)]
    members = [Member("old", "A100", {}, {"time_us tokens=64": 30.0}), *first]
    assert groups.summarize_numbers(members) == (
        groups.NumberSpread("A100", "time_us tokens=64", 1, 30.0, 0.0, 30.0, 30.0),
        groups.NumberSpread("H100", "time_us tokens=64", 3, 11.0, 1.0, 10.0, 13.0),
        groups.NumberSpread("H100", "copy_gb_per_second", 3, 2000.0, 0.0, 2000.0, 2000.0),
    )
    assert groups.summarize_numbers(members[::-1]) == groups.summarize_numbers(members)
