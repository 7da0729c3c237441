"""The Ray cluster: its nodes, and one task a node, with time limits and an end at Ctrl-C.

Ray places the tasks, moves the answers and sees deaths. Whatever happens to a node becomes its row.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moedoctor.fleet import node as node_module
from moedoctor.fleet.connection import ClusterError, Head
from moedoctor.fleet.rows import Place, Row, Status, make_failed_row, mask_line, quote_last_line, read_answer
from moedoctor.processes import interrupts
from moedoctor.results import ReportError, parse_json
from moedoctor.text import join_lines, shorten, suggest_expected

_GRACE_SECONDS = 15.0
"""The time that a node has beyond its limit to send its answer."""
_WAIT_SECONDS = 0.2
_CANCEL_SECONDS = 5.0
_MOST_WORDS = 10_000


@dataclass(frozen=True)
class Node:
    """A node that Ray lists as alive."""

    id: str
    host: str
    address: str
    gpus: int


@dataclass(frozen=True)
class Question:
    """The command that each node runs, and its limits."""

    module: str
    arguments: tuple[str, ...]
    seconds: float
    """The time limit of the command on a node."""
    per_gpu: bool = False
    idle_only: bool = False
    """True if Ray must give all GPUs of a node and a CPU; a node that is busy is then left alone."""
    wait_seconds: float = 60.0
    """The time that a node may take to start the task."""
    checksums: bool = False
    wheel: bytes | None = None
    """moedoctor for the nodes that lack it or have another version."""


def list_nodes(ray: Any) -> list[Node]:
    """Return the nodes that are alive, sorted by name."""
    nodes = [
        Node(
            str(row["NodeID"]),
            str(row.get("NodeManagerHostname") or row.get("NodeManagerAddress") or ""),
            str(row.get("NodeManagerAddress") or ""),
            int(row.get("Resources", {}).get("GPU", 0)),
        )
        for row in ray.nodes()
        if row.get("Alive")
    ]
    nodes.sort(key=lambda node: (node.host, node.id))
    groups = [list(same) for _, same in itertools.groupby(nodes, key=lambda node: node.host)]
    # On one machine several nodes have its name: each gets a number behind it.
    return [
        node if len(same) == 1 else replace(node, host=f"{node.host}#{number}")
        for same in groups
        for number, node in enumerate(same, 1)
    ]


def select(nodes: Sequence[Node], patterns: Sequence[str]) -> list[Node]:
    """Return the nodes that a pattern names: a host, an address, the start of an id, with * and ?.

    Raises ClusterError for a pattern that names none.
    """
    if not patterns:
        return list(nodes)
    chosen: set[str] = set()
    for pattern in patterns:
        matching = {node.id for node in nodes if _matches(node, pattern)}
        if not matching:
            known = suggest_expected(pattern, [node.host for node in nodes])
            raise ClusterError(f"--nodes {pattern}: {known}")
        chosen |= matching
    return [node for node in nodes if node.id in chosen]


def _matches(node: Node, pattern: str) -> bool:
    host = node.host.partition("#")[0]
    names = (node.host, host, host.partition(".")[0], node.address)
    return any(fnmatch.fnmatchcase(name, pattern) for name in names) or (
        len(pattern) >= 6 and node.id.startswith(pattern)
    )


@dataclass
class _Task:
    """A task that runs, as the driver sees it."""

    node: Node
    stream: Any
    since: float
    started: bool = False
    with_wheel: bool = False
    python: str | None = None
    start_seconds: float | None = None
    expected: int = 1
    """The number of answers that it gives: one a GPU where each GPU is asked."""
    answers: int = 0
    doing: str = ""
    """The last words of its command."""

    @property
    def place(self) -> Place:
        """The whole node."""
        return Place(self.node.id, self.node.host)

    @property
    def last_line(self) -> str:
        """The end of a message about a task that was ended."""
        return quote_last_line(self.doing, self.node.host)


def ask_nodes(
    ray: Any,
    nodes: Sequence[Node],
    question: Question,
    on_row: Callable[[Row], None],
    on_words: Callable[[str], None] = lambda words: None,
) -> None:
    """Ask every node and call `on_row` for each answer as it comes, at least once a node.

    `on_words` gets what a node is doing, for a progress bar.

    Returns early after a signal inside `interrupts.hold_signals`: what still runs is cancelled and gets
    its row.
    """
    asker = _Asker(ray, question, on_row, on_words)
    for node in nodes:
        asker.submit(node)
    head = Head.find(ray)
    try:
        while asker.tasks and not interrupts.get_signal() and not head.is_lost():
            asker.step()
    finally:
        if head.answers():
            asker.cancel_all()
        else:
            asker.give_up()


class _Asker:
    """The tasks that run, and what becomes of each."""

    def __init__(
        self, ray: Any, question: Question, on_row: Callable[[Row], None], on_words: Callable[[str], None]
    ) -> None:
        self.tasks: dict[Any, _Task] = {}
        self._ray, self._question, self._on_row, self._on_words = ray, question, on_row, on_words
        self._cancelled: list[Any] = []
        ray.cloudpickle.register_pickle_by_value(node_module)
        self._remote = ray.remote(node_module.answer)
        self._wheel = None if question.wheel is None else ray.put(question.wheel)

    def submit(self, node: Node, *, with_wheel: bool = False) -> None:
        """Send the question to a node, which runs it there or nowhere."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        question = self._question
        gpus_asked = node.gpus if question.per_gpu else 0
        reserved = question.idle_only and node.gpus > 0
        request = {**vars(question), "wheel": None, "gpus": gpus_asked, "reserved": reserved}
        cpus, gpus = _count_resources(question, node)
        task = self._remote.options(
            num_cpus=cpus,
            num_gpus=gpus,
            num_returns="streaming",
            max_retries=0,
            name="moedoctor fleet",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        stream = task.remote(request, self._wheel if with_wheel else None)
        expected = max(1, gpus_asked)
        self.tasks[stream] = _Task(node, stream, time.monotonic(), with_wheel=with_wheel, expected=expected)

    def step(self) -> None:
        """Take one answer, or wait a moment; end what is over its time."""
        ready, _ = self._ray.wait(list(self.tasks), num_returns=1, timeout=_WAIT_SECONDS, fetch_local=False)
        for stream in ready:
            self._take(self.tasks[stream])
        now = time.monotonic()
        for task in list(self.tasks.values()):
            self._check_time(task, now)

    def _take(self, task: _Task) -> None:
        try:
            text = self._ray.get(next(task.stream), timeout=_GRACE_SECONDS)
        except StopIteration:
            del self.tasks[task.stream]
            if not task.answers:
                self._fail(task, Status.DIED, "the task ended without an answer")
            return
        except Exception as error:
            self.tasks.pop(task.stream, None)
            cancelled = isinstance(error, self._ray.exceptions.TaskCancelledError)
            # Only the first line of Ray's words: the others are advice and addresses.
            first = next(filter(None, map(str.strip, str(error).splitlines())), "no reason given")
            status = Status.CANCELLED if cancelled else Status.DIED
            self._fail(task, status, f"{type(error).__name__}: {first}")
            return
        if not task.started:
            self._start(task, text)
            return
        if isinstance(text, str) and text.startswith('{"doing"') and len(text) < _MOST_WORDS:
            with contextlib.suppress(ReportError):
                task.doing = mask_line(str(parse_json(text, "answer").get("doing")), task.node.host)
                self._on_words(f"{task.node.host}: {task.doing or 'computes'}")
            return
        task.answers += 1
        row = replace(read_answer(task.place, text, python=task.python), start_seconds=task.start_seconds)
        if row.status in (Status.MISSING, Status.OTHER_VERSION) and self._send_wheel(task):
            return
        self._on_row(row)

    def _start(self, task: _Task, text: Any) -> None:
        """Read the first message of a node: that it started, and whether moedoctor is there."""
        waited = time.monotonic() - task.since
        task.started, task.since = True, time.monotonic()
        with contextlib.suppress(ReportError, TypeError):
            first = parse_json(text[:10_000], "answer")
            if isinstance(first, dict):
                task.python = shorten(join_lines(str(first.get("python"))), 30)
                age = first.get("worker_seconds")
                if isinstance(age, float):  # a worker that is older than the question did not start for it
                    task.start_seconds = age if 0 <= age <= waited else 0.0
                if first.get("missing") is True:
                    if not self._send_wheel(task):
                        reason = "moedoctor is not installed there; --runtime-env sends it"
                        self._fail(task, Status.MISSING, reason)
                    task.answers += task.expected

    def _send_wheel(self, task: _Task) -> bool:
        """Ask again with the wheel, once."""
        if self._wheel is None or task.with_wheel:
            return False
        self._end(task)
        self.submit(task.node, with_wheel=True)
        return True

    def _check_time(self, task: _Task, now: float) -> None:
        waited = now - task.since
        if not task.started and waited > self._question.wait_seconds:
            self._end(task)
            status = Status.BUSY if self._question.idle_only else Status.HUNG
            self._fail(task, status, self._explain_wait(task, waited))
        elif task.started and waited > self._question.seconds + _GRACE_SECONDS:
            self._end(task)
            self._fail(task, Status.HUNG, f"no answer within {waited:.0f} s{task.last_line}")

    def _explain_wait(self, task: _Task, waited: float) -> str:
        """Return what a task that did not start was waiting for, and what Ray says it has."""
        cpus, gpus = _count_resources(self._question, task.node)
        if not cpus and not gpus:
            return f"it did not start the task within {waited:.0f} s; nothing but a Ray worker was asked for"
        asked = f"{gpus} {'GPU' if gpus == 1 else 'GPUs'} and {cpus} CPU" if gpus else f"{cpus} CPU"
        has = ""
        with contextlib.suppress(Exception):
            total, free = self._ray.cluster_resources(), self._ray.available_resources()
            kinds = [kind for kind in ("GPU", "CPU") if kind in total]
            figures = [f"{free.get(kind, 0):g} of {total[kind]:g} {kind}s" for kind in kinds]
            has = f"; free in the cluster: {', '.join(figures)}"
        return f"waited {waited:.0f} s for {asked}{has}"

    def _fail(self, task: _Task, status: Status, reason: str) -> None:
        """Give the row of a task that failed; one that gave all its answers has its rows."""
        if task.answers < task.expected:
            self._on_row(make_failed_row(task.place, status, reason))

    def _end(self, task: _Task) -> None:
        """Forget a task and let Ray end it: kindly, so that it ends its child and removes its folder."""
        self.tasks.pop(task.stream, None)
        with contextlib.suppress(Exception):
            self._ray.cancel(task.stream, force=False)
        self._cancelled.append(task.stream)

    def give_up(self) -> None:
        """Give each task that still runs its row. Ray is asked for nothing: it has no head any more."""
        for task in self.tasks.values():
            self._fail(task, Status.DIED, "the head of the Ray cluster died before this node answered")
        self.tasks.clear()

    def cancel_all(self) -> None:
        """End what still runs, give each a row, and wait for a moment until it has ended."""
        for task in list(self.tasks.values()):
            spent = time.monotonic() - task.since
            started = f"interrupted {spent:.0f} s after it started{task.last_line}"
            not_started = f"interrupted before it started; {self._explain_wait(task, spent)}"
            self._end(task)
            self._fail(task, Status.CANCELLED, started if task.started else not_started)
        deadline = time.monotonic() + _CANCEL_SECONDS
        while self._cancelled and time.monotonic() < deadline:
            ready, _ = self._ray.wait(
                self._cancelled, num_returns=1, timeout=_WAIT_SECONDS, fetch_local=False
            )
            for stream in ready:
                try:
                    next(stream)
                except (Exception, StopIteration):
                    self._cancelled.remove(stream)
        for stream in self._cancelled:
            with contextlib.suppress(Exception):
                self._ray.cancel(stream, force=True)


def _count_resources(question: Question, node: Node) -> tuple[int, int]:
    """Return the CPUs and GPUs that Ray is asked for."""
    return (1, node.gpus) if question.idle_only else (0, 0)
