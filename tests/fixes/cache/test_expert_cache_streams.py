"""The order in which the engine ``device`` queues work and waits, checked with fake streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moedoctor.fixes.expert_cache import ExpertCache

pytest.importorskip("triton", reason="needs Triton: pip install triton")


class Streams:
    """Two streams; `log` lists the requests in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.captures = False
        self.breaks: str | None = None
        self.current = "main"

    def wait_stream(self, other: str) -> None:
        self.log.append(f"copies wait for {other}")

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        self.current = "copies"
        try:
            yield
        finally:
            self.current = "main"

    def event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.current} waits for {event.after}")


class Event:
    """Stores the work that it was recorded after."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.after = ""

    def record(self) -> None:
        self.after = self._streams.log[-1]


class Main:
    """The compute stream."""

    def __init__(self, streams: Streams) -> None:
        self.wait_event = streams.wait_event
        self._log = streams.log

    def wait_stream(self, other: Streams) -> None:
        self._log.append("main waits for the stream of copies")

    def __str__(self) -> str:
        return "main"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    module = "moedoctor.fixes.cache.device"

    def logs(what: str) -> Any:
        def ask(*_: object, **__: object) -> None:
            found.log.append(f"{what} on {found.current}")
            if what == found.breaks:
                raise torch.OutOfMemoryError("out of memory")

        return ask

    monkeypatch.setattr(f"{module}.interprets", lambda: True)
    monkeypatch.setattr(f"{module}.launch_lookup", logs("lookup"))
    monkeypatch.setattr(f"{module}.launch_groups", logs("groups"))
    monkeypatch.setattr(f"{module}.Transfer.launch", logs("copy"))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: found if found.current == "copies" else Main(found)
    )
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: found.inside())
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.captures)
    return found


@pytest.fixture
def cache(streams: Streams) -> ExpertCache:
    found = ExpertCache({"w": torch.zeros(8, 4)}, 4, engine="device", device="cpu")
    found._engine._copies = streams  # type: ignore[attr-defined]
    return found


IDS = torch.zeros(1, 2, dtype=torch.int32)
COPIED = ["lookup on main", "copies wait for main", "copy on copies"]
WAITED = "main waits for copy on copies"


def test_copies_beside_hits_begin_after_the_lookup_and_end_before_the_misses(
    cache: ExpertCache, streams: Streams
) -> None:
    for part, _ in zip(("hits", "misses"), cache.groups(IDS, overlap=True), strict=False):
        streams.log.append(part)
    assert streams.log == [*COPIED, "hits", WAITED, "misses"]
    streams.log.clear()
    cache.acquire(IDS)
    assert streams.log == ["lookup on main", "copy on main"]


@pytest.mark.parametrize("next_call", ["acquire", "prefetch", "overlap", "groups", "seed"])
def test_work_after_a_failed_call_waits_for_its_copies(
    cache: ExpertCache, streams: Streams, next_call: str
) -> None:
    next(iter(cache.groups(IDS, overlap=True)))
    assert streams.log == COPIED
    streams.log.clear()
    many = torch.zeros(3, 2, dtype=torch.int32)
    {
        "acquire": lambda: cache.acquire(IDS),
        "prefetch": lambda: cache.prefetch(IDS),
        "overlap": lambda: list(cache.groups(IDS, overlap=True)),
        "groups": lambda: list(cache.groups(many)),
        "seed": lambda: cache.seed(IDS),
    }[next_call]()
    assert streams.log[0] == WAITED
    assert streams.log.count(WAITED) == (2 if next_call == "overlap" else 1)


def test_a_group_waits_for_an_earlier_prefetch(cache: ExpertCache, streams: Streams) -> None:
    parts = cache.groups(torch.zeros(3, 2, dtype=torch.int32))
    next(parts)
    cache.prefetch(IDS)
    streams.log.clear()
    next(parts)
    assert streams.log == [WAITED, "lookup on main", "copy on main"]


def _fill(cache: ExpertCache) -> torch.Tensor:
    """Pretend that expert 5 is in slot 2, because lookups are fake here, and return the state."""
    state = cache._engine._state  # type: ignore[attr-defined]
    state.slot_of[5], state.expert_of[2], state.copies[0] = 2, 5, 1
    return torch.cat([state.slot_of, state.expert_of, state.copies[:1]])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("breaks", ["lookup", "copy"])
def test_nothing_is_resident_after_a_failed_call(
    cache: ExpertCache, streams: Streams, overlap: bool, breaks: str
) -> None:
    """The reset runs after copies that may still be running."""
    _fill(cache)
    streams.breaks = breaks
    with pytest.raises(torch.OutOfMemoryError):
        next(cache.groups(IDS, overlap=overlap))
    assert streams.log[-1] == "main waits for the stream of copies"
    assert cache.mapping.tolist() == [-1] * 8
    assert cache.resident() == [-1] * 4
    assert int(cache._engine._state.copies[0]) == 0  # type: ignore[attr-defined]
    streams.breaks = None
    streams.log.clear()
    cache.acquire(IDS)
    assert streams.log == ["lookup on main", "copy on main"]


@pytest.mark.parametrize("how", ["acquire", "overlap", "prefetch"])
def test_a_failed_capture_does_not_record_a_reset(cache: ExpertCache, streams: Streams, how: str) -> None:
    """No captured work has run, so the next call finds the cache unchanged."""
    before = _fill(cache)
    streams.breaks, streams.captures = "copy", True
    with pytest.raises(torch.OutOfMemoryError):
        {
            "acquire": lambda: cache.acquire(IDS),
            "overlap": lambda: next(cache.groups(IDS, overlap=True)),
            "prefetch": lambda: cache.prefetch(IDS),
        }[how]()
    state = cache._engine._state  # type: ignore[attr-defined]
    streams.breaks, streams.captures = None, False
    streams.log.clear()
    cache.acquire(IDS)
    assert streams.log == ["lookup on main", "copy on main"]
    assert torch.equal(torch.cat([state.slot_of, state.expert_of, state.copies[:1]]), before)


def test_a_pending_reset_is_not_recorded(
    cache: ExpertCache, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = cache._engine
    streams.breaks = "copy"
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_forget_all", lambda: 1 / 0)
        with pytest.raises(torch.OutOfMemoryError):
            cache.acquire(IDS)
    before = _fill(cache)
    streams.breaks, streams.captures = None, True
    with pytest.raises(RuntimeError, match="once outside of the capture"):
        cache.acquire(IDS)
    state = engine._state  # type: ignore[attr-defined]
    assert torch.equal(torch.cat([state.slot_of, state.expert_of, state.copies[:1]]), before)
    streams.captures = False
    cache.acquire(IDS)
    assert cache.mapping.tolist() == [-1] * 8
