"""Asks an implementation in this process; as a script, our own kernels in Triton's interpreter."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from moedoctor.testing import load_questions
from moedoctor.testing.questions import Setting, Sizes, UnfitError, takes


def ask(
    kind: str,
    implementation: Any,
    options: Mapping[str, Any],
    names: Any = (),
    sizes: Sizes | None = None,
    device: str = "cpu",
) -> Iterator[str]:
    """Give what is wrong with each answer that is not right; a refusal that is allowed is right."""
    module = importlib.import_module(f"moedoctor.testing.{kind}")
    options = {**getattr(implementation, "moedoctor", {}), **options}
    variants = module.list_variants(implementation, options) if kind == "moe" else ("",)
    for name in names or load_questions(kind):
        question = load_questions(kind)[name]
        if question.needs and not takes(implementation, question.needs):
            continue
        for variant in variants:
            for each in (sizes,) if sizes else question.sizes:
                try:
                    reason = module.ask(implementation, name, each, Setting(variant, options, device))
                except UnfitError:
                    reason = None
                except Exception as error:
                    reason = None if question.may_refuse else f"{type(error).__name__}: {error}"
                if reason is not None:
                    yield f"{variant} {name} {dict(each)}: {reason}"


if __name__ == "__main__":
    from moedoctor.testing.adapters import ours

    few = {"tokens": 3, "experts": 5, "top_k": 2}
    for asked in sys.argv[1:]:
        kind, name, *formats = asked.split(":")
        options = {"activations": ("silu",), "formats": formats}
        size = {"moe": {**few, "hidden": 64, "intermediate": 64}, "cache": {**few, "slots": 4}, "router": few}
        wrong = list(ask(kind, getattr(ours, name), options if kind == "moe" else {}, sizes=size[kind]))
        assert not wrong, (asked, wrong)
