"""The connection to a Ray cluster: how the driver finds it, waits for nothing in vain, and leaves it."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moedoctor.fleet import probe
from moedoctor.processes.guardian import make_temporary_folder
from moedoctor.text import join_lines, shorten

_CONNECT_SECONDS = 5.0
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_HEAD_SECONDS = 2.0
_HEAD_LOST_SECONDS = 30.0
"""Ray itself gives up after 60 s, and ends the process."""
is_lost = False
"""True if a cluster lost its head in this process; Ray's threads then crash its usual end."""


class ClusterError(Exception):
    """No cluster can be used; one line says what to do."""


@contextlib.contextmanager
def connect(address: str) -> Iterator[Any]:
    """Give the module `ray`, connected to the cluster at `address`: ``auto``, ``HOST:PORT`` or ``local``.

    ``local`` starts Ray on this machine and ends it. Raises ClusterError.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a diagnosis reports to nobody
    ray = _import_ray(address)
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"address": address}
        if address == "local":
            # A new token, not one that Ray would leave in the home folder.
            if "RAY_AUTH_TOKEN" not in os.environ:
                os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
                stack.callback(os.environ.pop, "RAY_AUTH_TOKEN", None)
            folder = stack.enter_context(make_temporary_folder())
            options.update(include_dashboard=False, _temp_dir=folder)
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))  # where Ray says that a node died
        with contextlib.redirect_stderr(io.StringIO()):  # its banners
            try:
                ray.init(**options, log_to_driver=False, logging_level="CRITICAL", configure_logging=True)
            except Exception as error:
                raise _explain_refusal(address, str(error)) from None
        stack.callback(_leave, ray, Head.find(ray))
        yield ray


def _import_ray(address: str) -> Any:
    """Return the module `ray`, once it is known that a cluster is at `address`."""
    if address not in ("auto", "local"):
        _check_listening(address)
    if address != "local" and any(os.environ.get(name) for name in _TOKENS):
        # Without a mode, Ray 2.60 ignores the token. It reads the mode as it is imported.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ImportError as error:
        missing = "Ray is not installed" if error.name == "ray" else f"Ray cannot be imported ({error})"
        raise ClusterError(f"{missing}; run `pip install 'ray>=2.40'` beside moedoctor") from None
    reason = None if address == "local" else probe.find_problem(ray, address)
    if reason is not None:
        raise _explain_refusal(address, reason)
    return ray


def _explain_refusal(address: str, reason: str) -> ClusterError:
    if address == "auto" and "Could not find any running Ray instance" in reason:
        return ClusterError(
            "--address auto: no Ray cluster runs on this machine; run this on a node of the cluster, "
            "start one with `ray start --head`, or say --address local"
        )
    if "AuthToken" in reason or "authentication" in reason.lower():
        return ClusterError(
            f"--address {address}: the cluster does not take this token, or wants one; set RAY_AUTH_TOKEN to "
            "the cluster's token, or RAY_AUTH_MODE=token to use ~/.ray/auth_token"
        )
    shown = shorten(join_lines(reason), 200)
    return ClusterError(
        f"--address {address}: {shown}; expected the head of a Ray cluster, as `ray start --head` names it"
    )


def _leave(ray: Any, head: Head) -> None:
    """End the connection. Without a head, Ray would wait for it and then end this process, report or not."""
    global is_lost
    if head.answers():
        ray.shutdown()
    else:
        is_lost = True
        atexit.unregister(ray.shutdown)


@dataclass
class Head:
    """The process of the cluster that knows all others; without it, Ray ends the driver after a minute."""

    address: tuple[str, int] | None
    """Host and port; None if this Ray does not say them."""
    answered: float

    @classmethod
    def find(cls, ray: Any) -> Head:
        """Return the head of the cluster that `ray` is connected to."""
        host, _, port = str(getattr(ray.get_runtime_context(), "gcs_address", "")).rpartition(":")
        return cls((host.strip("[]"), int(port)) if port.isdigit() else None, time.monotonic())

    def answers(self) -> bool:
        """Return whether it takes a connection."""
        try:
            if self.address is not None:
                socket.create_connection(self.address, timeout=_HEAD_SECONDS).close()
        except OSError:
            return False
        self.answered = time.monotonic()
        return True

    def is_lost(self) -> bool:
        """Return whether it has not answered for a while; it may be started anew, as KubeRay does."""
        quiet = time.monotonic() - self.answered
        return quiet > _HEAD_SECONDS and not self.answers() and quiet > _HEAD_LOST_SECONDS


def _check_listening(address: str) -> None:
    """Raise ClusterError at once if nothing listens there."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ClusterError(
            f"--address {shorten(join_lines(address), 100)}: expected auto, local or HOST:PORT"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        reason = "no answer" if isinstance(error, TimeoutError) else reason
        raise _explain_refusal(address, reason) from None
