"""From a GPU's fault to a client that knows: an event of NVML, and a call that hangs. On the fake NVML."""

import contextlib
from functools import partial
from typing import Final

from agent.bench.effort import Effort
from agent.bench.latency import batches, caused, seconds
from agent.bench.nvml import Director, NoLibrary, fake_nvml
from agent.bench.processes import HEALTH_METHOD, Line, agent, health_socket, subscriber
from agent.bench.result import Outcome, Table, row_of
from agent.bench.trees import scratch

GPUS: Final = 16
"""Of each agent: one half for events, the other to hang."""
XID: Final = 62
"""A micro-controller on the chip halted: Unhealthy, whatever else is known."""
PERIOD_MS: Final = 10
DEADLINE_MS: Final = 100
CONFIG: Final = f'[gpu]\ndeadline = "{DEADLINE_MS}ms"\ndead = "1m"\n'
TOLD: Final = r"(gpu-\d+).{1,24}?gpu\.(?:xid|not_answering)"
"""A device's name in the kubelet's message, and what is said of it."""


def run(effort: Effort, outcome: Outcome) -> None:
    """Both, each on a GPU that had nothing yet."""
    events: list[int] = []
    hangs: list[int] = []
    library = ""
    for batch in batches(effort.causes, GPUS // 2):
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(scratch())
            try:
                fake = fake_nvml(directory, GPUS)
            except NoLibrary as why:
                outcome.skipped.append(f"detect: GPUs: {why}")
                return
            flags = ["--period", f"{PERIOD_MS}ms", "--nvml-library", str(fake.library)]
            flags += ["--cgroupfs-root", str(directory / "none")]
            stack.enter_context(agent(directory, flags, CONFIG, fake.environment))
            client = stack.enter_context(subscriber(health_socket(directory), HEALTH_METHOD, TOLD))
            client.wait(lambda line: "found" in line)
            director = stack.enter_context(fake.told())
            for gpu in range(len(batch)):
                event = partial(director.tell, f"gpu {gpu} xid {XID}")
                events.append(caused(client, event, partial(_tells_of, gpu)).took_ns)
            for gpu in range(GPUS // 2, GPUS // 2 + len(batch)):
                hang = partial(_hang, director, gpu)
                hangs.append(caused(client, hang, partial(_tells_of, gpu)).took_ns)
                director.tell(f"gpu {gpu} release")
            library = client.library
    rows = (
        row_of("detect.nvml", f"XID {XID} as an event of NVML", seconds(events), "s"),
        row_of("detect.hang", "a call of NVML that hangs: less its deadline", seconds(hangs), "s"),
    )
    notes = (
        f"one subscriber, {library}; from before the fake is told; {GPUS} GPUs, each with one fault at most",
        f"the deadline is {DEADLINE_MS} ms; 0 to {PERIOD_MS} ms of a hang are waiting for the next pass",
    )
    outcome.tables.append(Table("GPU to client; fake NVML", rows, notes=notes))


def _hang(director: Director, gpu: int) -> int:
    return director.tell(f"gpu {gpu} hang nvmlDeviceGetFieldValues") + DEADLINE_MS * 1_000_000


def _tells_of(gpu: int, line: Line) -> bool:
    return f"gpu-{gpu}" in line["found"]
