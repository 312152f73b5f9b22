"""Being told to stop: by Ctrl-C at a terminal, or by a scheduler that takes the machine away."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Stopped(NamedTuple):
    """Why a run ended before its last step."""

    signal: signal.Signals
    step: int


class StopRequest:
    """Which signal has come, if any."""

    received: signal.Signals | None = None


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Note the first SIGINT or SIGTERM instead of dying of it; the second one ends the process as usual."""
    request = StopRequest()
    previous: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def note(number: int, frame: object) -> None:
        del frame
        request.received = signal.Signals(number)
        restore()

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, note)
    try:
        yield request
    finally:
        restore()
