"""Fault model of a simulated fleet: kinds of faults with their rates, random machines and random scripts.

A script is a list of events on one machine. All random numbers are drawn when the script is generated, so
that a script is the complete input of a simulated node and can be shortened, saved and run again.

Published rates, per GPU or machine and year:

* Llama 3 405B (Meta, 2024): in 54 days on 16,384 H100, 419 unexpected interruptions; 148 by faulty GPUs, 72
  by HBM3, 19 by SRAM, 17 by the GPU's system processor. 54 days of 16,384 GPUs are 2,422 GPU-years.
* "DRAM Errors in the Wild" (Google, 2009): a third of the machines had correctable errors in a year, 1.3 %
  uncorrectable ones.

All other rates are assumptions, chosen higher than on real nodes.
"""

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec

from agent.errors import ConfigError
from agent.model.health import Severity

DAY_S: Final = 86_400
DAYS_MAX: Final = 3660
YEAR_S: Final = 365.25 * DAY_S
LLAMA_GPU_YEARS: Final = 54 * 16_384 / 365.25
QUIET_START_S: Final = 300
"""Time without events at the start of a script [s]: values at start are those of a sound machine."""
SCRIPT_VERSION: Final = 1
_Seconds = Annotated[int, msgspec.Meta(ge=0, le=DAYS_MAX * DAY_S)]
GPU_MODELS: Final = ("H100", "T4")


class FaultKind(msgspec.Struct, frozen=True):
    """Kind of event in a fault script, and the health verdicts on devices that it must and may cause."""

    name: str
    target: str
    """Kind of the affected part: ``gpu``, ``numa``, ``source``, ``declared`` or ``node``."""
    per_year: float
    """Rate of events for each such part [1/year]."""
    median_s: float
    """Median duration [s]; the durations have a log-normal distribution."""
    expected: Severity = Severity.OK
    """Severity that the affected devices must have at least; OK: none."""
    allowed: tuple[str, ...] = ()
    """Patterns of the codes that may make affected devices Unhealthy, because of this event."""
    detect_s: float = 10
    """Longest time from the event until no affected device is Healthy at the kubelet [s]."""
    clear_s: float = 150
    """Longest time from the end until the affected devices are Healthy again [s]."""
    cure: str = "itself"
    """End of the fault: ``itself``, ``reset`` of the GPU, ``reload`` of the driver or ``reboot`` of the
    node."""
    source: str = "assumed"
    """Origin of the rate."""


_UNHEALTHY, _UNKNOWN, _DEGRADED = Severity.UNHEALTHY, Severity.UNKNOWN, Severity.DEGRADED
_LLAMA: Final = "Llama 3: "
_GPU_CODES: Final = ("gpu.xid.*", "gpu.recovery_action", "gpu.ecc.*", "gpu.remap.*")

FAULT_KINDS: Final = {
    kind.name: kind
    for kind in (
        FaultKind("gpu-lost", "gpu", 49 / LLAMA_GPU_YEARS, 4 * 3600, _UNHEALTHY,
                  (*_GPU_CODES, "gpu.lost", "gpu.missing"), cure="reboot", source=_LLAMA + "1/3 of 148"),
        FaultKind("gpu-halted", "gpu", 49 / LLAMA_GPU_YEARS, 3600, _UNHEALTHY, _GPU_CODES, cure="reload",
                  source=_LLAMA + "1/3 of 148"),
        FaultKind("gpu-link", "gpu", 50 / LLAMA_GPU_YEARS, 3600, _UNHEALTHY, (*_GPU_CODES, "gpu.nvlink.*"),
                  cure="reset", source=_LLAMA + "1/3 of 148"),
        FaultKind("gpu-uncorrectable", "gpu", 36 / LLAMA_GPU_YEARS, 1800, _UNHEALTHY, _GPU_CODES,
                  cure="reset", source=_LLAMA + "1/2 of 72"),
        FaultKind("gpu-contained", "gpu", 36 / LLAMA_GPU_YEARS, 1800, _UNHEALTHY, _GPU_CODES, cure="reset",
                  source=_LLAMA + "1/2 of 72"),
        FaultKind("gpu-sram", "gpu", 19 / LLAMA_GPU_YEARS, 1800, _UNHEALTHY, _GPU_CODES, cure="reset",
                  source=_LLAMA + "19"),
        FaultKind("gpu-gsp", "gpu", 17 / LLAMA_GPU_YEARS, 1800, _UNHEALTHY, _GPU_CODES, cure="reset",
                  source=_LLAMA + "17"),
        FaultKind("gpu-remap", "gpu", 0.1, 7200, _DEGRADED, cure="reset"),
        FaultKind("gpu-instance", "gpu", 1.0, 0, allowed=("gpu.xid.94",)),
        FaultKind("gpu-hang", "gpu", 1.0, 40, _UNKNOWN, ("gpu.not_answering",), detect_s=16),
        FaultKind("gpu-failing", "gpu", 0.5, 60, _UNKNOWN),
        FaultKind("gpu-hot", "gpu", 2.0, 300, _DEGRADED),
        FaultKind("gpu-program", "gpu", 12.0, 0, clear_s=900),
        FaultKind("gpu-flood", "gpu", 1.0, 0, clear_s=900),
        FaultKind("driver-reload", "node", 2.0, 0, clear_s=150),
        FaultKind("nvml-crash", "node", 2.0, 5, _UNKNOWN, detect_s=60),
        FaultKind("pool-shrunk", "numa", 1.0, 1800, _UNHEALTHY, ("mem.hugepages.*",)),
        FaultKind("cpu-offline", "numa", 1.0, 1800, _UNHEALTHY, ("cpu.offline",)),
        FaultKind("dimm-correctable", "numa", 0.33, 0, clear_s=2 * DAY_S, source="Google DRAM: 1/3"),
        FaultKind("dimm-uncorrectable", "numa", 0.013, 4 * 3600, _UNHEALTHY, ("mem.ecc.*",), cure="reboot",
                  source="Google DRAM: 1.3 %"),
        FaultKind("source-hang", "source", 0.5, 60, _UNKNOWN, detect_s=30),
        FaultKind("prepare-fault", "declared", 0.5, 900, _UNHEALTHY, ("driver.*",), detect_s=3000,
                  clear_s=900),
        FaultKind("disk-slow", "node", 4.0, 300),
        FaultKind("agent-restart", "node", 12.0, 5),
        FaultKind("agent-stop", "node", 4.0, 60),
        FaultKind("kubelet-restart", "node", 6.0, 10),
        FaultKind("kubelet-crash", "node", 2.0, 20),
        FaultKind("clock-step", "node", 4.0, 1800),
        FaultKind("reboot", "node", 2.0, 240),
    )
}  # fmt: skip
"""Kinds of events by name."""

SOURCES: Final = ("cpus", "hugepages", "edac", "kmsg")
"""Sources that a script lets hang, by the target of the event."""


class MachineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hardware and drivers of a simulated node."""

    gpus: Annotated[int, msgspec.Meta(ge=0, le=16)]
    model: str = "H100"
    """Model of the GPUs: ``H100`` or ``T4``."""
    migs: tuple[Annotated[int, msgspec.Meta(ge=0, le=7)], ...] = ()
    """Number of MIG instances of each GPU."""
    numa_nodes: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    cpus_per_node: Annotated[int, msgspec.Meta(ge=2, le=128)] = 8
    pool_pages: Annotated[int, msgspec.Meta(ge=0)] = 512
    """Hugepages of 2 MiB on each NUMA node; 0: no pool."""
    declares: bool = True
    """True: a DRA driver declares the GPUs and CPUs, and prepares claims with them."""


class ScriptEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Event of a fault script: a fault or a disturbance that begins on a simulated machine."""

    at: _Seconds
    """Time since the start of the script [s]."""
    kind: str
    target: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of the affected GPU, NUMA node, source or declared device."""
    lasts: _Seconds = 0
    """Time until the end of the fault [s]; 0: the event has no end. Of ``clock-step``: the step, of which
    ``target`` has the sign (0: forward, 1: back)."""


class NodeScript(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Complete input of one simulated node: its machine, and the events that happen on it."""

    machine: MachineSpec
    length: Annotated[int, msgspec.Meta(ge=1, le=DAYS_MAX * DAY_S)]
    """Simulated time [s]."""
    events: tuple[ScriptEvent, ...] = ()
    """Events by time."""
    note: str = ""
    """What the script shows."""
    version: int = SCRIPT_VERSION


def random_script(
    seed: int, node: int, days: float, rate_factor: float = 1.0, machine: MachineSpec | None = None
) -> NodeScript:
    """Return the script of one node of a fleet; the same arguments give the same script.

    Args:
        seed: Seed of the fleet.
        node: Number of the node.
        days: Simulated time [days].
        rate_factor: Factor for all rates: a short run with a high factor has as many faults as a long one.
        machine: Machine of the node; None: a random one.
    """
    draw = random.Random(f"{seed}/{node}")
    machine = machine or random_machine(draw)
    length = max(QUIET_START_S, round(days * DAY_S))
    events = sorted(_random_events(draw, machine, length, rate_factor), key=lambda new: (new.at, new.kind))
    return NodeScript(machine, length, tuple(events))


def random_machine(draw: random.Random) -> MachineSpec:
    """Return a random machine: mostly eight H100, some with MIG, some T4, some without a GPU."""
    model = draw.choice(("H100", "H100", "H100", "T4"))
    gpus = draw.choice((0, 1, 2, 4, 8, 8, 8))
    has_migs = model == "H100" and draw.random() < 0.3
    return MachineSpec(
        gpus,
        model,
        tuple(draw.choice((0, 0, 2, 7)) if has_migs else 0 for _ in range(gpus)),
        draw.choice((1, 2, 2)),
        draw.choice((4, 8, 32)),
        draw.choice((0, 512, 4096)),
        draw.random() < 0.7,
    )


def parts_of(machine: MachineSpec, target: str) -> int:
    """Return the number of a machine's parts of one kind, on which events can happen.

    ``target`` is the kind of the parts: ``gpu``, ``numa``, ``source`` or ``declared``.
    """
    numbers = {"gpu": machine.gpus, "numa": machine.numa_nodes, "source": len(SOURCES), "node": 1}
    numbers["declared"] = machine.gpus + machine.numa_nodes if machine.declares else 0
    return numbers[target]


def _random_events(
    draw: random.Random, machine: MachineSpec, length: int, rate_factor: float
) -> Iterator[ScriptEvent]:
    for kind in FAULT_KINDS.values():
        for target in range(parts_of(machine, kind.target)):
            mean_s = YEAR_S / (kind.per_year * rate_factor)
            at_s = QUIET_START_S + draw.expovariate(1 / mean_s)
            while at_s < length:
                lasts = draw.lognormvariate(math.log(kind.median_s), 1.0) if kind.median_s else 0.0
                chosen = draw.randrange(2) if kind.name == "clock-step" else target
                yield ScriptEvent(
                    int(at_s), kind.name, chosen, min(max(1, round(lasts)), 7 * DAY_S) if lasts else 0
                )
                at_s += lasts + draw.expovariate(1 / mean_s)


# --- files --------------------------------------------------------------------------------------------------


def encode_script(script: NodeScript) -> str:
    """Return a fault script (events on one simulated machine) as JSON text, an event per line."""
    head = msgspec.to_builtins(msgspec.structs.replace(script, events=()))
    del head["events"]
    lines = ",\n    ".join(msgspec.json.encode(event).decode() for event in script.events)
    fields = [f'  "{name}": {msgspec.json.encode(value).decode()}' for name, value in head.items()]
    events = f"[\n    {lines}\n  ]" if lines else "[]"
    return "{\n" + ",\n".join([*fields, f'  "events": {events}']) + "\n}\n"


def read_script(path: Path) -> NodeScript:
    """Read a fault script (events on one simulated machine) from a JSON file.

    Raises:
        ConfigError: The file cannot be read, or is no valid script.
    """
    try:
        script = msgspec.json.decode(path.read_bytes(), type=NodeScript)
    except OSError as error:
        raise ConfigError(f"fault script {path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"fault script {path}: {error}") from None
    if script.version != SCRIPT_VERSION:
        raise ConfigError(
            f"fault script {path}: version {script.version} is not {SCRIPT_VERSION}, which this release runs"
        )
    machine = script.machine
    if len(machine.migs) not in (0, machine.gpus):
        raise ConfigError(
            f"fault script {path}: migs has {len(machine.migs)} numbers for {machine.gpus} GPUs; give one "
            "for each GPU"
        )
    if machine.model not in GPU_MODELS:
        raise ConfigError(
            f"fault script {path}: model {machine.model!r} is not one of {', '.join(GPU_MODELS)}"
        )
    for number, event in enumerate(script.events, 1):
        place = f"{path}: event {number}"
        if event.kind not in FAULT_KINDS:
            raise ConfigError(
                f"fault script {place}: kind {event.kind!r} is not one of {', '.join(FAULT_KINDS)}"
            )
        parts = 2 if event.kind == "clock-step" else parts_of(machine, FAULT_KINDS[event.kind].target)
        if event.target >= parts:
            raise ConfigError(
                f"fault script {place}: target {event.target}: the node has only {parts} such targets, "
                "numbered from 0"
            )
    return msgspec.structs.replace(script, events=tuple(sorted(script.events, key=lambda event: event.at)))
