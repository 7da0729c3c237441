"""A text in other words is like the thread of its error, and a text about something else is like none."""

from moedoctor.diagnose.triage.alike import find_alike
from moedoctor.diagnose.triage.signatures import load_data

ROWS = load_data("threads.yaml")["threads"]


def test_examples_are_most_like_their_own_threads():
    examples = [(row["thread"], each) for row in ROWS[::3] for each in row.get("like", ())]
    found = [(name, find_alike(each["text"], each["kind"], ROWS)) for name, each in examples]
    own = sum(row is not None and row["thread"] == name for name, row in found)
    others = sum(row is not None and row["thread"] != name for name, row in found)
    assert own > 0.9 * len(examples)
    assert others < 0.01 * len(examples)


def test_a_text_is_like_a_row_only_by_rare_words():
    refused = "# gptq_marlin_repack: PTX of an unsupported toolchain\n\nAn H100 with an old driver"
    assert (find_alike(refused, "backend", ROWS) or {}).get("thread") == "vllm#38619"
    assert find_alike("# It does not work\n\nvLLM on my GPU fails with an error", "unknown", ROWS) is None
