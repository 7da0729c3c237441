"""The trace that ships with moedoctor: its size, shape and description."""

from moedoctor.bench.cache.replay import collect_trace_facts, replay_trace
from moedoctor.bench.cache.shipped import SHIPPED, load_shipped_trace
from moedoctor.entries import find_reports_folder


def test_it_is_below_a_megabyte_and_has_the_shape_of_a_large_model() -> None:
    assert (find_reports_folder() / SHIPPED).stat().st_size < 1_000_000
    trace = load_shipped_trace()
    assert (trace.num_experts, trace.top_k, len(trace.layers)) == (128, 8, 8)
    assert trace.stream_rows == (256,) * 16
    assert all(len(call) == 8 for layer in range(8) for call in trace.list_calls(layer))


def test_its_readme_describes_how_it_was_made() -> None:
    made = load_shipped_trace().made
    text = (find_reports_folder() / SHIPPED.parent / "README.md").read_text(encoding="utf-8")
    assert made["script"] in text
    for figure in (
        f"{made['steps_done']:,} steps",
        f"the {made['files']} `.py` files of the {made['text']}",
        f"torch {made['torch']}",
        f"seed {made['settings']['seed']}",
        f"loss on held-out text is {made['held_out_loss']:.2f}",
    ):
        assert figure in text, figure


def test_tokens_reuse_experts_and_the_optimum_has_more_hits() -> None:
    trace = load_shipped_trace()
    assert collect_trace_facts(trace).reuse > 2 * 8 / 128, "tokens reuse experts more than chance"
    lru, belady = replay_trace(trace, capacities=[16], policies=("lru", "belady"))
    assert belady.hit_rate > lru.hit_rate + 0.05
