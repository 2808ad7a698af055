"""Signals that end a sweep, and messages to a terminal that may be closed by then. Without torch."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# Signals that end a sweep as Ctrl-C does: of a terminal that is closed, and of batch systems before a job's time is up.
PASSED_ON = tuple(
    getattr(signal, name)
    for name in ("SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)


def handle_signals(handler: Callable[[int, Any], Any]) -> dict[int, Any]:
    """Install a handler for Ctrl-C and similar signals; return the former handlers by signal."""
    default_handlers = (signal.SIG_DFL, signal.default_int_handler)
    passed_on = [
        number for number in PASSED_ON if signal.getsignal(number) in default_handlers
    ]
    return {
        number: signal.signal(number, handler)
        for number in (signal.SIGINT, signal.SIGTERM, *passed_on)
    }


def say(text: str) -> None:
    """Write to stderr; do nothing if the terminal was closed."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        silence(sys.stderr)


def silence(stream: Any) -> None:
    """Redirect a closed stream to the null device, so that Python can exit without an error."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
