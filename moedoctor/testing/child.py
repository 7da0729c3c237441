"""Asks the questions in a child process: imports the target, and writes what comes of each problem."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.metadata
import importlib.util
import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from moedoctor.processes.ask import answer, find_working_folder
from moedoctor.processes.deaths import classify, find_first_line
from moedoctor.results import Death
from moedoctor.testing.questions import KINDS, Question, Setting, Sizes, UnfitError, load_questions, takes
from moedoctor.text import TextFileError, explain_missing_torch, read_text

_MOST_SOURCE = 10_000_000
_STARTING = 300.0
"""Seconds in which a child has to import the target: vLLM takes half a minute, on a cold disk more."""
_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 64, 128, 256)
_MOST_SHRINKS = 60
_FIRST = "ordinary"
"""The question that shows whether an implementation takes a variant at all."""


def load_target(text: str) -> Any:
    """Return what ``package.module:name`` or ``file.py:name`` names. Imports it."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ImportError(f"{text!r}: expected package.module:name or file.py:name")
    folder = find_working_folder()
    if place.endswith(".py"):
        file = os.path.join(folder, place)
        try:
            read_text(Path(file), _MOST_SOURCE)  # the import would wait for a pipe
        except TextFileError as error:
            raise ImportError(error.message) from None
        module_name = os.path.splitext(os.path.basename(file))[0]
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, os.path.dirname(file))
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, folder)
        module = importlib.import_module(place)
    return operator.attrgetter(name)(module)


def answer_request(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """In the child: yield an event for the target, for each problem before it is computed, each answer."""
    faulthandler.dump_traceback_later(_STARTING, exit=True)
    try:
        target = load_target(request["target"])
        declared = dict(getattr(target, "moedoctor", {}))
        kind = request["kind"] or declared.get("kind") or _guess_kind(target)
        if kind not in KINDS:
            raise TypeError(f"its kind is not clear: give --kind, one of {', '.join(KINDS)}")
    except Exception as error:
        reason = explain_missing_torch(error) or f"{type(error).__name__}: {error}"
        yield {"event": "unusable", "reason": find_first_line(reason)}
        return
    undefined, package = declared.pop("undefined", {}), declared.pop("package", None)
    declared.pop("kind", None)
    options = {**declared, **request["options"]}
    about = {"kind": kind, "options": options, "undefined": undefined}
    yield {"event": "target", **about, **_describe(package or target.__module__, request["device"])}
    module = importlib.import_module(f"moedoctor.testing.{kind}")
    done = {tuple(key) for key in request["done"]}
    for variant in getattr(module, "list_variants", lambda target, options: ("",))(target, options):
        setting = Setting(variant, options, request["device"], request["seed"])
        refused: str | None = None
        for question in load_questions(kind).values():
            if (request["only"] and question.name not in request["only"]) or (variant, question.name) in done:
                continue
            head = {"variant": variant, "question": question.name}
            lacks = question.needs is not None and not takes(target, question.needs)
            skip = f"takes no {question.needs}" if lacks else refused
            if skip is not None:
                yield {"event": "answer", **head, "verdict": "skipped", "reason": skip}
                continue
            for event in _ask(partial(module.ask, target), question, setting, request):
                yield {**head, **event}
            if question.name == _FIRST and variant and event["verdict"] in ("refused", "skipped"):
                refused = f"refuses {variant}"


def _ask(
    compute: Callable[[str, Sizes, Setting], str | None],
    question: Question,
    setting: Setting,
    request: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Yield an event before each problem, and the answer: the first that is not right, made smaller."""

    def ask(sizes: Sizes, named: bool = False) -> str | None:
        faulthandler.dump_traceback_later(request["seconds"], exit=True)
        raise_pending = partial(_raise_pending_error, setting.device)
        try:
            reason = compute(question.name, sizes, setting._replace(named=named))
            raise_pending()
            return reason
        except Exception:
            with suppress(Exception):  # of the same launch; the next question must not find it
                raise_pending()
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()

    unfit, asked = "", False
    for sizes in (request["sizes"],) if request["sizes"] else question.sizes:
        yield {"event": "begin", "sizes": sizes}
        try:
            reason = ask(sizes)
        except UnfitError as error:
            unfit = str(error)
            continue
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            _end_without_gpu(text)
            # An implementation that refuses a format is not wrong.
            allowed = bool(setting.variant) and question.name == _FIRST
            event = {"event": "answer", "verdict": "refused", "reason": find_first_line(text)}
            yield {**event, "sizes": sizes, "allowed": allowed}
            return
        asked = True
        if reason is not None:
            if not request["sizes"]:
                sizes, reason = _shrink(ask, dict(sizes), reason)
            reason = ask(sizes, named=True) or reason
            yield {"event": "answer", "verdict": "wrong", "reason": reason, "sizes": sizes}
            return
    yield {"event": "answer", **({"verdict": "right"} if asked else {"verdict": "skipped", "reason": unfit})}


def _raise_pending_error(device: str) -> None:
    """Raise the error that a launch left for whoever launches next, such as one without blocks."""
    import torch

    if device.startswith("cuda"):
        torch.zeros(1, device=device)  # its launch looks for it
        torch.cuda.synchronize(device)


def _end_without_gpu(text: str) -> None:
    """End this process if an error says that it lost its GPU; another child goes on."""
    if classify(text) not in (None, Death.OUT_OF_MEMORY):
        print(find_first_line(text), file=sys.stderr, flush=True)
        os._exit(1)


def _shrink(ask: Callable[[Sizes], str | None], sizes: dict[str, int], reason: str) -> tuple[Sizes, str]:
    """Return smaller sizes for which the answer is wrong as well, and what is wrong then."""
    left, smaller = _MOST_SHRINKS, True
    while smaller:
        smaller = False
        for name, size in sizes.items():
            for step in (step for step in _STEPS if step < size and left > 0):
                left -= 1
                try:
                    other = ask({**sizes, name: step})
                except Exception as error:  # these sizes make no problem, or are refused
                    _end_without_gpu(f"{type(error).__name__}: {error}")
                    continue
                if other is not None:
                    sizes, reason, smaller = {**sizes, name: step}, other, True
                    break
    return sizes, reason


def _guess_kind(target: Any) -> str | None:
    marks = {"logits": "router", "gating_output": "router", "topk_ids": "moe", "w13": "moe"}
    marks |= {"capacity": "cache", "budget_bytes": "offloader"}
    return next((kind for mark, kind in marks.items() if mark in inspect.signature(target).parameters), None)


def _describe(package: str, device: str) -> dict[str, str]:
    """Return the package with its version, and the machine with torch's."""
    import torch

    torch.set_num_threads(1)  # the problems are small, and other processes may be busy
    top = package.split(".")[0]
    name = next(iter(importlib.metadata.packages_distributions().get(top, ())), package)
    try:
        version = f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        own = getattr(sys.modules.get(top), "__version__", None)
        version = f"{top} {own}" if own else name
    place = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    place += ", Triton's interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else ""
    return {"package": version, "machine": f"{place}, torch {torch.__version__}"}


if __name__ == "__main__":
    answer(answer_request)
