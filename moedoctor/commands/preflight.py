"""`moedoctor preflight -- vllm serve ...`: would a server start, and load what its checkpoint holds?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moedoctor.commands.options import (
    Capability,
    CheckFormat,
    Full,
    InputError,
    Output,
    convert_errors,
    declare,
    number,
    option,
    parse_names,
    parse_numbers,
    require_capability,
    require_writable,
    split_texts,
)
from moedoctor.commands.pages import deliver_document
from moedoctor.text import print_message

if TYPE_CHECKING:
    from moedoctor.diagnose.preflight.ask import Release
    from moedoctor.diagnose.preflight.command import ServeCommand
    from moedoctor.diagnose.preflight.records import StartAnswer

_FAIL_ON = ("refused", "wrong", "cannot-say", "warning")
_MOST_SIZE = 64
_MOST_RANK = 4096


@declare(
    command=typer.Argument(
        metavar="-- vllm serve MODEL ...",
        help="Command line of the server. MODEL is a checkpoint folder, its config.json, a repository in "
        "the Hugging Face cache, or a file that `moedoctor preflight headers FOLDER` wrote.",
    ),
    memory=option(
        "GIB", "Memory of one GPU. Default: as much as this machine's GPU, or 80 with --sm.", number(most=1e6)
    ),
    gpus=option(
        "N",
        "GPUs of the server's machine. Default: the GPUs of this machine, or 8 with --sm.",
        number("1 to 1024", most=1024, whole=True),
    ),
    python=option("FILE", "Ask the vLLM of this Python instead of the installed one."),
    wheel=option("FILE", "Ask the vLLM of this wheel, or of a folder with the package vllm."),
    releases=option("FILE,...", "Ask these wheels, folders or Pythons, too, and compare the answers."),
    sizes=option(
        "N",
        "Ask for the tensor-parallel sizes 1 to 8, 16, 32 and N, with and without expert parallelism, too.",
        number("1 to 64", most=_MOST_SIZE, whole=True),
    ),
    rank=option("R,...", "Ranks to ask. Default: the first, the last, and one of each stage."),
    compose=option("FILE", "Read the command line from a compose file."),
    script=option("FILE", "Read the LLM(...) call of a Python script, which is not run."),
    trust_remote_code="Let the checkpoint's own code run here, if the command line says so.",
    fail_on=option(
        "NAME,...", "Exit with 1 for these: refused, wrong, cannot-say, warning. Default: refused,wrong."
    ),
    ignore=option("TEXT,...", "Leave out findings of these rules, or whose tensor contains one of these."),
    timeout=option("SECONDS", "Limit for one release.", number(most=86400)),
    verbose=typer.Option(
        "--verbose", "-v", help="Show also why other backends are not used, and what happens after loading."
    ),
)
def preflight(
    command: list[str] | None = None,
    sm: Capability = None,
    memory: float | None = None,
    gpus: float | None = None,
    python: Path | None = None,
    wheel: Path | None = None,
    releases: list[str] | None = None,
    sizes: float | None = None,
    rank: list[str] | None = None,
    compose: Path | None = None,
    script: Path | None = None,
    trust_remote_code: bool = False,
    fail_on: list[str] | None = None,
    ignore: list[str] | None = None,
    timeout: float = 600.0,
    verbose: bool = False,
    format: CheckFormat = "table",
    output: Output = None,
    full: Full = False,
) -> int:
    """Say whether a server would start, and load what its checkpoint holds: no GPU, no weights.

    The release's own parser, model class, loader and backend selection run on the checkpoint's headers. Exit
    code 1 if it would not start or would answer wrongly, 2 if that cannot be said.
    """
    from moedoctor.diagnose.preflight import ask
    from moedoctor.diagnose.preflight.command import TRUST
    from moedoctor.diagnose.preflight.document import drop_ignored, make_document
    from moedoctor.diagnose.preflight.model import ModelError, open_model
    from moedoctor.processes import interrupts

    if command and command[0] == "headers":
        return _write_headers(command[1:], output)
    start = _read_command(command, compose, script)
    with convert_errors(ask.ReleaseError):
        found = [ask.find_release(str(given)) for given in (python, wheel) if given is not None]
        if len(found) > 1:
            raise InputError(
                "--python and --wheel name two releases, expected one; the others go to --releases"
            )
        asked = [*(found or [_find_installed()]), *(ask.find_release(text) for text in split_texts(releases))]
    gpu = _find_gpu(sm, memory, gpus)
    ranks = parse_numbers("--rank", rank, _MOST_RANK, f"numbers from 0 to {_MOST_RANK}", 0) or None
    question = ask.Question(*gpu, ranks, verbose, trust_remote_code, timeout)
    rules = parse_names("--fail-on", fail_on, _FAIL_ON) or _FAIL_ON[:2]
    starts = [start, *_list_sizes(start, sizes)]
    answers: list[StartAnswer] = []
    with convert_errors(ModelError), open_model(*start.source) as model, interrupts.hold_signals():
        folders = [replace(each, words=(str(model.folder), *each.words[1:])) for each in starts]
        for place, release in enumerate(asked):
            print_message(f"asking vLLM {release.name}, which takes seconds")
            replies = ask.ask_release(release, folders[: None if place == 0 else 1], question, model.headers)
            answers += [replace(each, words=(start.model, *each.words[1:])) for each in replies]
        notes = [*start.notes, *model.notes]
    if TRUST in start.words and not trust_remote_code:
        notes.append(
            "--trust-remote-code was left out: give it to preflight, too, to run the checkpoint's own code"
        )
    answers = [drop_ignored(answer, split_texts(ignore)) for answer in answers]
    document = make_document(start.model, question, answers, notes, fail_on=rules)
    code, reasons = document.summary.exit_code, document.summary.reasons
    return deliver_document(document, format, output, full=full, verbose=verbose, code=code, reasons=reasons)


def _write_headers(words: list[str], output: Path | None) -> int:
    from moedoctor.diagnose.preflight.model import ModelError, pack_headers
    from moedoctor.text import format_size

    if len(words) != 1:
        raise InputError(
            "preflight headers: expected one checkpoint folder: moedoctor preflight headers FOLDER -o FILE"
        )
    folder = Path(words[0])
    file = output or Path(f"{folder.resolve().name}.headers.zip")
    require_writable(file)
    with convert_errors(ModelError):
        size = pack_headers(folder, file)
    print_message(
        f"{file}: {format_size(size)} of config and headers, for `moedoctor preflight -- vllm serve {file}`"
    )
    return 0


def _read_command(command: list[str] | None, compose: Path | None, script: Path | None) -> ServeCommand:
    """Return the one start that is given. Raises InputError."""
    from moedoctor.diagnose.preflight.command import CommandError, read_compose, read_script, read_words

    if sum(bool(given) for given in (command, compose, script)) != 1:
        raise InputError("expected one of: -- vllm serve MODEL ..., --compose FILE, --script FILE")
    with convert_errors(CommandError):
        if compose is not None:
            return read_compose(compose)
        return read_script(script) if script is not None else read_words(command or ())


def _find_installed() -> Release:
    """Return the vLLM of this environment. Raises InputError without one."""
    from moedoctor.diagnose.preflight.ask import find_installed

    if (release := find_installed()) is None:
        raise InputError(
            "vllm is not installed here: name the server's Python (--python FILE) or a wheel (--wheel FILE)"
        )
    return release


def _find_gpu(sm: str | None, memory: float | None, gpus: float | None) -> tuple[tuple[int, int], int, int]:
    """Return capability, bytes and number of the server's GPUs: this machine's, unless `sm` names another.

    Raises InputError without a capability.
    """
    from moedoctor import environment

    facts = environment.collect() if sm is None else {}
    major, _, minor = require_capability(sm or facts.get("capability")).partition(".")
    own = facts.get("gpus") or ()
    size = int(memory * 2**30) if memory else own and own[0].get("memory_bytes")
    return (int(major), int(minor)), size or 80 << 30, int(gpus or len(own) or 8)


def _list_sizes(start: ServeCommand, most: float | None) -> list[ServeCommand]:
    """Return the start at each size up to `most`; above 8 at powers of two, which is what heads divide by."""
    count = int(most or 0)
    sizes = [size for size in range(1, count + 1) if size <= 8 or not size & (size - 1) or size == count]
    return [start.use_sizes(size, expert) for size in sizes for expert in (False, True)]
