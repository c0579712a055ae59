"""How long it takes from a cause to a client that knows: the loop that all kinds of causes share."""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from agent.bench.processes import Line, Subscriber
from agent.bench.result import NS_PER_S, Row, rows_of
from agent.bench.timing import Race, Timed

COALESCE_S: Final = 0.1  # changes that follow one within this time are sent together: causes come later


def pause() -> None:
    """Until the next change goes out at once; a random time, so that no phase of a period is preferred."""
    time.sleep(COALESCE_S * (1.2 + random.random()))


class Told(NamedTuple):
    """A cause, and the message that tells of it."""

    start_ns: int
    took_ns: int


def caused(client: Subscriber, cause: Callable[[], int], told: Callable[[Line], bool]) -> Told:
    """Cause something, which says when that began [ns], and wait for the message that tells of it."""
    pause()
    client.seen()
    start_ns = cause()
    return Told(start_ns, int(client.wait(told)["t_ns"]) - start_ns)


def batches(number: int, size: int) -> Iterable[range]:
    """So many numbers, in ranges of at most ``size``."""
    return (range(first, min(first + size, number)) for first in range(0, number, size))


def seconds(latencies_ns: Sequence[int]) -> list[float]:
    """The same in seconds."""
    return [latency / NS_PER_S for latency in latencies_ns]


def paired_rows(key: str, labels: dict[str, str], latencies_ns: dict[str, Sequence[int]]) -> tuple[Row, ...]:
    """Rows of what was measured of the same causes; ratios are to ``floor``, cause by cause."""
    timed = {name: Timed(tuple((float(one),) for one in values), 1) for name, values in latencies_ns.items()}
    return rows_of(key, labels, Race(timed, ()), "floor")
