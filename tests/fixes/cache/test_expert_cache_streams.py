"""The order in which the engine ``device`` queues work and waits, checked with fake streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from moedoctor.fixes.expert_cache import ExpertCache
from moedoctor.fixes.layer_stream import LayerStream

pytest.importorskip("triton", reason="needs Triton: pip install triton")


class Stream:
    """Logs what it is asked to wait for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: mock.Mock) -> None:
        self._log.append(f"{self.name} waits for {event.after}")


class Streams:
    """Two streams; `log` lists the requests in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.captures = False
        self.breaks: str | None = None
        self.main, self.copies = Stream("main", self.log), Stream("copies", self.log)
        self.current = self.main

    def of(self, call: Callable[..., object], *given: object) -> list[str]:
        """Return what a call requests."""
        self.log.clear()
        call(*given)
        return self.log

    @contextlib.contextmanager
    def inside(self, stream: Stream) -> Iterator[None]:
        self.current = stream
        try:
            yield
        finally:
            self.current = self.main

    def event(self) -> mock.Mock:
        event = mock.Mock()
        event.record = lambda: setattr(event, "after", self.log[-1])
        return event

    def logs(self, what: str) -> Callable[..., None]:
        def ask(*_: object, **__: object) -> None:
            self.log.append(f"{what} on {self.current.name}")
            if what == self.breaks:
                raise torch.OutOfMemoryError("out of memory")

        return ask


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    module = "moedoctor.fixes.cache.device"
    monkeypatch.setattr(f"{module}.interprets", lambda: True)
    monkeypatch.setattr(f"{module}.launch_lookup", found.logs("lookup"))
    monkeypatch.setattr(f"{module}.launch_groups", found.logs("groups"))
    monkeypatch.setattr(f"{module}.Transfer.launch", found.logs("copy"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current)
    monkeypatch.setattr(torch.cuda, "stream", found.inside)
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.captures)
    return found


@pytest.fixture
def cache(streams: Streams) -> ExpertCache:
    found = ExpertCache({"w": torch.zeros(8, 4)}, 4, engine="device", device="cpu")
    found._engine._copies = streams.copies  # type: ignore[attr-defined]
    return found


IDS, MANY = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)
CALLS: dict[str, Callable[[ExpertCache], Any]] = {
    "acquire": lambda cache: cache.acquire(IDS),
    "prefetch": lambda cache: cache.prefetch(IDS),
    "overlap": lambda cache: list(cache.groups(IDS, overlap=True)),
    "groups": lambda cache: list(cache.groups(MANY)),
    "seed": lambda cache: cache.seed(IDS),
}
ACQUIRED = ["lookup on main", "copy on main"]
COPIED = ["lookup on main", "copies waits for main", "copy on copies"]
WAITED = "main waits for copy on copies"


def test_copies_beside_hits_begin_after_the_lookup_and_end_before_the_misses(cache, streams):
    for part, _ in zip(("hits", "misses"), cache.groups(IDS, overlap=True), strict=False):
        streams.log.append(part)
    assert streams.log == [*COPIED, "hits", WAITED, "misses"]
    assert streams.of(cache.acquire, IDS) == ACQUIRED


@pytest.mark.parametrize("next_call", CALLS)
def test_work_after_a_failed_call_waits_for_its_copies(cache, streams, next_call):
    next(iter(cache.groups(IDS, overlap=True)))
    assert streams.log == COPIED
    log = streams.of(CALLS[next_call], cache)
    assert log[0] == WAITED
    assert log.count(WAITED) == (2 if next_call == "overlap" else 1)


def test_a_group_waits_for_an_earlier_prefetch(cache: ExpertCache, streams: Streams) -> None:
    parts = cache.groups(MANY)
    next(parts)
    cache.prefetch(IDS)
    assert streams.of(next, parts) == [WAITED, *ACQUIRED]


def _state(cache: ExpertCache) -> list[int]:
    state = cache._engine._state  # type: ignore[attr-defined]
    return torch.cat([state.slot_of, state.expert_of, state.copies[:1]]).tolist()


def _fill(cache: ExpertCache) -> list[int]:
    """Pretend that expert 5 is in slot 2, because lookups are fake here, and return the state."""
    state = cache._engine._state  # type: ignore[attr-defined]
    state.slot_of[5], state.expert_of[2], state.copies[0] = 2, 5, 1
    return _state(cache)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("breaks", ["lookup", "copy"])
def test_nothing_is_resident_after_a_failed_call(cache, streams, overlap, breaks):
    """The reset runs after copies that may still be running."""
    _fill(cache)
    streams.breaks = breaks
    with pytest.raises(torch.OutOfMemoryError):
        next(cache.groups(IDS, overlap=overlap))
    assert streams.log[-1] == "main waits for copies"
    assert _state(cache) == [-1] * (8 + 4) + [0]
    streams.breaks = None
    assert streams.of(cache.acquire, IDS) == ACQUIRED


@pytest.mark.parametrize("how", ["acquire", "overlap", "prefetch"])
def test_a_failed_capture_is_joined_and_records_no_reset(cache, streams, how):
    """No captured work has run, so the next call finds the cache unchanged."""
    before = _fill(cache)
    streams.breaks, streams.captures = "copy", True
    with pytest.raises(torch.OutOfMemoryError):
        CALLS[how](cache)
    assert streams.log[-2:] == ["copies waits for main", "main waits for copies"]
    streams.breaks, streams.captures = None, False
    assert streams.of(cache.acquire, IDS) == ACQUIRED
    assert _state(cache) == before


def test_a_pending_reset_is_not_recorded(cache, streams, monkeypatch):
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
    assert _state(cache) == before
    streams.captures = False
    cache.acquire(IDS)
    assert cache.mapping.tolist() == [-1] * 8


JOINED = ["copies waits for main", "main waits for copies"]
BEGUN: dict[str, Callable[[ExpertCache], Any]] = {
    "overlap": lambda cache: (parts := cache.groups(IDS, overlap=True), next(parts)),
    "prefetch": lambda cache: cache.prefetch(IDS),
}


@pytest.mark.parametrize("how", BEGUN)
@pytest.mark.parametrize("captures", [False, True])
def test_nobody_waits_for_the_copies_of_a_capture_that_failed(cache, streams, how, captures):
    """Their event cannot be waited for outside of that capture."""
    streams.captures = True
    begun = BEGUN[how](cache)
    streams.captures = captures  # another capture, or none
    assert streams.of(cache.acquire, IDS) == [*(JOINED if captures else ()), *ACQUIRED]
    streams.captures = False
    assert streams.of(cache.acquire, IDS) == ACQUIRED
    del begun


def test_a_loop_over_groups_that_breaks_off_leaves_a_capture_joined(cache, streams):
    def capture() -> None:
        for _ in cache.groups(IDS, overlap=True):
            streams.log.clear()
            raise KeyboardInterrupt

    streams.captures = True
    with pytest.raises(KeyboardInterrupt) as held:  # as is the frame of the loop
        capture()
    assert streams.log == JOINED
    assert streams.of(cache.acquire, IDS) == ACQUIRED
    del held


def test_a_stream_of_layers_waits_for_a_prefetch(cache: ExpertCache, streams: Streams) -> None:
    source = cache.make_copier(cache.allocate_all())
    cache.prefetch(IDS)
    assert streams.of(source)[0] == WAITED


def test_a_layer_waits_for_copies_that_it_began_and_the_last_for_none(streams: Streams) -> None:
    """To wait for copies outside of a capture voids it, and vLLM captures layers one by one."""
    caches = [ExpertCache({"w": torch.zeros(8, 4)}, 4, engine="device", device="cpu") for _ in range(3)]
    stream = LayerStream(caches)
    stream._copies = streams.copies  # type: ignore[assignment]
    for number in range(3):
        streams.log.clear()
        with stream.fetch(number):
            streams.log.append("computes")
        own = ["copy on main"] if number == 0 else []
        last = number == 2
        assert streams.log == [
            *own,
            *([] if last else ["copies waits for main", "copy on copies"]),
            "computes",
            *([] if last else ["main waits for copies"]),
        ]
