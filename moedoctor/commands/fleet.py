"""`moedoctor fleet COMMAND`: one command on every node or GPU of a Ray cluster, and what differs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from moedoctor.commands.audit import audit
from moedoctor.commands.bench.bench import bench
from moedoctor.commands.check import check
from moedoctor.commands.lint import lint
from moedoctor.commands.options import (
    CheckFormat,
    Full,
    InputError,
    Output,
    choose_from,
    convert_errors,
    declare,
    name_errors,
    number,
    option,
    split_texts,
)
from moedoctor.commands.pages import deliver_document
from moedoctor.commands.run import run
from moedoctor.processes import interrupts
from moedoctor.text import print_message

if TYPE_CHECKING:
    from moedoctor.fleet.cluster import Node, Question
    from moedoctor.fleet.report import Collector
    from moedoctor.fleet.rows import Row
    from moedoctor.fleet.store import Store

_COMMANDS = {"check": check, "run": run, "bench": bench, "audit": audit, "lint": lint}
_SECONDS = {"run": 3600.0, "bench": 3600.0}
_OTHER_SECONDS = 300.0
_USES_GPU = ("run", "bench")
PARITY = ("run", "parity")
_NOT_THERE = ("-o", "--output", "-f", "--format")


@declare(
    command=typer.Argument(
        metavar="COMMAND",
        parser=name_errors("fleet", choose_from(tuple(_COMMANDS))),
        help="check, run, bench, audit or lint. `run parity` names GPUs that compute other bits.",
    ),
    arguments=typer.Argument(
        metavar="ARGUMENTS", help="Arguments and options of that command, with paths of the nodes."
    ),
    address=option(
        "auto|HOST:PORT|local",
        "The Ray cluster: this machine's, a head's, or a new cluster on this machine alone.",
    ),
    nodes=option(
        "NAME[,...]",
        "Ask only these nodes: hosts, addresses or starts of Ray's ids; * and ? match. Default: all.",
    ),
    per=option(
        "node|gpu",
        "Run once a node, or once a GPU. Default: gpu for bench and run parity, else node.",
        choose_from(("node", "gpu")),
    ),
    idle_only=typer.Option(
        "--idle-only/--no-idle-only",
        help="Ask Ray for a CPU and all GPUs of each node, and leave a node that is busy alone. "
        "Default: on for run and bench.",
    ),
    node_timeout=option(
        "SECONDS",
        "Seconds that the command may take on a node. Default: 300, for run and bench 3600.",
        number("seconds, above 0 and at most 86400", most=86_400),
    ),
    wait=option(
        "SECONDS",
        "Seconds that a node may take to start; with --idle-only, to become idle.",
        number("seconds, above 0 and at most 86400", most=86_400),
    ),
    runtime_env=option(
        "WHEEL", "Send this wheel of moedoctor to nodes that lack it or have another version; nothing stays."
    ),
    reports=option(
        "FOLDER",
        "A new folder for the nodes' reports, written as they come. Default: one in the cache folder.",
    ),
    resume=option("FOLDER", "Go on with the reports in this folder: ask only the nodes without an answer."),
    from_reports=option(
        "FOLDER",
        "Ask nobody: compare the JSON reports in this folder, one file a node, gathered by any means.",
    ),
    show_hosts="Name hosts in files too. A terminal always shows them.",
)
def fleet(
    command: str,
    arguments: list[str] | None = None,
    address: str = "auto",
    nodes: list[str] | None = None,
    per: str | None = None,
    idle_only: bool | None = None,
    node_timeout: float | None = None,
    wait: float = 60.0,
    runtime_env: Path | None = None,
    reports: Path | None = None,
    resume: Path | None = None,
    from_reports: Path | None = None,
    show_hosts: bool = False,
    format: CheckFormat = "table",
    output: Output = None,
    full: Full = False,
) -> int:
    """Run a command on every node of a Ray cluster and show what differs.

    Nodes with the same answers are one group; each other group is named by what differs and who is in it.

    `fleet run parity` computes one seeded MoE layer several times on each GPU, and names a GPU whose bits
    differ from one run to the next or from those of equal GPUs. (The scenario PARITY, which compares MoE
    backends, is `fleet run backend_parity`.)

    Exit code 1 if a node has a finding, gave no answer, or differs in a way that a rule calls wrong.
    """
    from moedoctor.fleet import connection
    from moedoctor.fleet.cluster import Question, list_nodes, select
    from moedoctor.fleet.connection import ClusterError
    from moedoctor.fleet.report import Collector
    from moedoctor.fleet.rows import mask
    from moedoctor.fleet.store import Store, StoreError
    from moedoctor.processes.streams import leave

    given = (command, *(arguments or ()))
    _check_arguments(given)
    per_gpu = per == "gpu" if per is not None else command == "bench" or given == PARITY
    shown = show_hosts or (output is None and sys.stdout.isatty())
    if sum(folder is not None for folder in (reports, resume, from_reports)) > 1:
        raise InputError("--reports, --resume and --from-reports: expected one of the three")
    collected = Collector(show_hosts=shown)
    folder = from_reports or resume or reports or _name_new_folder(command)
    if from_reports is not None:
        _take_folder(from_reports, collected)
    else:
        parity = given == PARITY
        question = Question(
            module="moedoctor.fleet.parity" if parity else "moedoctor",
            arguments=() if parity else (*given, "--format", "json"),
            seconds=node_timeout or _SECONDS.get(command, _OTHER_SECONDS),
            per_gpu=per_gpu,
            idle_only=command in _USES_GPU if idle_only is None else idle_only,
            wait_seconds=wait,
            checksums=command in ("check", "run") and not parity,
            wheel=None if runtime_env is None else _read_wheel(runtime_env),
        )
        about = {"question": [*given, "per", "gpu" if per_gpu else "node"]}
        opened = partial(Store.create if resume is None else Store.resume, folder, about)
        with convert_errors(ClusterError, StoreError):
            # A folder to go on with is checked first; a new one is made when the cluster has answered.
            store = None if resume is None else opened(show_hosts=show_hosts)
            with connection.connect(address) as ray:
                chosen = select(list_nodes(ray), split_texts(nodes))
                _ask(ray, chosen, question, store or opened(show_hosts=show_hosts), collected)
    result = collected.report(
        tuple(str(mask(word, "")) for word in given),
        per_gpu=per_gpu,
        folder=str(mask(_relate_folder(folder, output), "")),
        interrupted=interrupts.get_signal() is not None,
    )
    code = deliver_document(
        result, format, output, full=full, code=result.summary.exit_code, reasons=result.closing, masked=True
    )
    code = interrupts.exit_code(otherwise=code)
    return leave(code) if connection.is_lost else code


def _relate_folder(folder: Path, output: Path | None) -> str:
    """Return the folder of the reports relative to a report beside it, so that they can be moved together."""
    if output is None or not folder.resolve().is_relative_to(beside := output.resolve().parent):
        return str(folder)
    return str(folder.resolve().relative_to(beside))


def _check_arguments(given: Sequence[str]) -> None:
    """Raise a usage error here for what each node would refuse."""
    command, *arguments = given
    for argument in arguments:
        if argument.split("=")[0] in _NOT_THERE:
            raise InputError(f"fleet {command}: {argument} is for the whole; nodes answer in JSON")
    if tuple(given) == PARITY:
        return
    parser = typer.Typer(add_completion=False)
    parser.command()(cast(Any, _COMMANDS[command]))
    typer.main.get_command(parser).make_context(f"moedoctor fleet {command}", arguments)


def _read_wheel(wheel: Path) -> bytes:
    """Return the content of a wheel of moedoctor. Raises InputError for another file."""
    import zipfile

    from moedoctor.text import TextFileError, read_bytes

    try:
        content = read_bytes(wheel, 256 << 20, "a wheel of moedoctor")
    except TextFileError as error:
        raise InputError(f"--runtime-env {wheel}: {error.message}") from None
    if not zipfile.is_zipfile(wheel) or "moedoctor/__init__.py" not in zipfile.ZipFile(wheel).namelist():
        raise InputError(f"--runtime-env {wheel}: expected a wheel of moedoctor (`pip wheel --no-deps`)")
    return content


def _name_new_folder(command: str) -> Path:
    from moedoctor.upstream.releases.wheel import cache_folder

    return cache_folder("fleet") / f"{time.strftime('%Y%m%d-%H%M%S')}-{command}-{os.getpid()}"


def _take_folder(folder: Path, collected: Collector) -> None:
    from moedoctor.fleet.store import StoreError, read_folder

    with convert_errors(StoreError):
        rows = list(read_folder(folder))
    for row in rows:
        collected.add(row)
    if not rows:
        raise InputError(f"--from-reports {folder}: holds no JSON file; expected one a node")


def _ask(ray: Any, nodes: Sequence[Node], question: Question, store: Store, collected: Collector) -> None:
    """Ask the nodes that have no answer in `store`, and write and collect each answer as it comes."""
    from moedoctor.fleet.cluster import ask_nodes
    from moedoctor.processes.files import OutputError
    from moedoctor.processes.streams import report_loss
    from moedoctor.reporters.output import show_progress

    hosts = {node.id: node.host for node in nodes}
    kept = [row for row in store.read_rows(hosts) if row.place.node in hosts]
    for row in kept:
        collected.add(row)
    done = {row.place.node for row in kept}
    waiting = [node for node in nodes if node.id not in done]
    print_message(f"asking {len(waiting)} of {len(nodes)} nodes; their reports go to {store.folder}")
    answered: set[str] = set()
    with interrupts.hold_signals(), show_progress() as progress:

        def take(row: Row) -> None:
            try:
                row = store.write(row)
            except OutputError as error:
                report_loss(f"the report of {row.place.name} is not kept: {error}")
            collected.add(row)
            answered.add(row.place.node)
            progress(len(answered), len(waiting), f"{row.place.name}: {row.status.value}")

        def show(words: str) -> None:
            progress(len(answered), len(waiting), words)

        show("waiting for the first node")
        ask_nodes(ray, waiting, question, take, show)
