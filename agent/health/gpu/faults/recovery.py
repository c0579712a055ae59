"""What ends a latched fault: the driver that asks for nothing more, a reset that was seen, a new boot, time.

A fault that is over is *healed*; its cause is then held for a probation by the state machine, like any other.
What was healed is remembered: it may come back, and old lines of the kernel log must not raise it again.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from agent.health.gpu.faults.values import DAY_NS, SHARED, Fault, FaultLog, Key
from agent.health.gpu.views import GpuRuleState
from agent.health.gpu.xid.facts import Decision
from agent.model.faults import Cure
from agent.model.gpu import GpuField, GpuSample, Status
from agent.model.reading import Reading
from agent.model.time import NS, Instant, at_mono

SETTLE_NS: Final = 10 * NS
"""The driver says what must be done a moment after the fault; only then does its silence mean anything."""
EXPIRE_NS: Final = 600 * NS

_BY_RESET: Final = frozenset({Cure.ACTION, Cure.NOTHING_PENDING, Cure.LINKS_UP, Cure.RESET})
_BY_CALM: Final = frozenset({Cure.ACTION, Cure.NOTHING_PENDING})
VOLATILE: Final = (
    GpuField.ECC_UNCORRECTABLE,
    GpuField.ECC_CORRECTABLE,
    GpuField.ECC_UNCORRECTABLE_DRAM,
    GpuField.ECC_UNCORRECTABLE_SRAM,
    GpuField.ECC_CORRECTABLE_DRAM,
    GpuField.ECC_CORRECTABLE_SRAM,
    GpuField.PCIE_REPLAY,
)
"""Counters that only a reset, or a new driver, sets back."""
_PENDING: Final = (GpuField.REMAP_PENDING, GpuField.REMAP_FAILURE, GpuField.RETIRED_PENDING)


class Watched(NamedTuple):
    """What is watched of a GPU for signs of its recovery."""

    counters: tuple[Reading, ...] = ()
    """VOLATILE, as they were read last."""
    action: int = 0
    """Recovery action that was read last; 0 if none ever was."""
    refused: bool = False
    """The driver asked for a reset when it was last heard of: status 16."""
    generation: int = 0
    """Of the driver that is known."""
    renewed: Instant | None = None
    """A new driver was seen then, and the GPU has not been read since."""
    read_ns: int = 0
    """When it was read last; it must answer after a fault for the fault to be over."""
    reset: Instant | None = None
    """When the last reset was seen."""
    calm: Instant | None = None
    """Since when the driver asks for nothing, and no row or page waits for a reset."""
    linked: Instant | None = None
    """Since when every NVLink that ever was up is up."""


def watch(
    before: Mapping[int, Watched], gpus: GpuRuleState, generation: int, now: Instant
) -> Mapping[int, Watched]:
    """The next look at every GPU, and at all of them together under SHARED."""
    found = {}
    for gpu in gpus.roll:
        sample, past = gpus.samples.get(gpu.number), gpus.past[gpu.number]
        seen = _renewed(before.get(gpu.number, Watched()), generation, now)
        if sample is None or not sample.passes:
            found[gpu.number] = seen
        elif sample.status != Status.OK:
            refused = sample.status == Status.RESET_REQUIRED
            found[gpu.number] = seen._replace(refused=refused, calm=None, linked=None)
        elif sample.beat_ns == seen.read_ns:
            found[gpu.number] = seen
        else:
            found[gpu.number] = _watch(seen, sample, past.start.links_up, now)
    found[SHARED] = _together(found.values())
    return found


def _renewed(before: Watched, generation: int, now: Instant) -> Watched:
    if not generation or generation == before.generation:
        return before
    return before._replace(generation=generation, renewed=now if before.generation else None)


def _watch(before: Watched, sample: GpuSample, links_up: int, now: Instant) -> Watched:
    counters = tuple(sample[which] for which in VOLATILE)
    fell = any(
        isinstance(was, int) and isinstance(value, int) and value < was
        for was, value in zip(before.counters, counters, strict=False)
    )
    action, links = sample[GpuField.RECOVERY_ACTION], sample[GpuField.LINKS_UP]
    done = before.action != 0 and action == 0
    at = at_mono(sample.beat_ns, now)
    anew = before.renewed is not None and sample.beat_ns > before.renewed.mono_ns
    reset = before.renewed if anew else before.reset
    calm = action == 0 and not any(sample[which] == 1 for which in _PENDING)
    linked = isinstance(links, int) and not links_up & ~links
    return Watched(
        counters=tuple(
            value if isinstance(value, int) else was
            for was, value in zip(before.counters or counters, counters, strict=True)
        ),
        action=action if isinstance(action, int) else before.action,
        generation=before.generation,
        renewed=None if anew else before.renewed,
        read_ns=sample.beat_ns,
        reset=at if fell or done or before.refused else reset,
        calm=(before.calm or at) if calm else None,
        linked=(before.linked or at) if linked else None,
    )


def _together(all_gpus: Iterable[Watched]) -> Watched:
    """What holds of every GPU holds of what they share, since the last of them."""
    gpus = list(all_gpus)
    resets = [one.reset for one in gpus]
    calm = [one.calm for one in gpus]
    linked = [one.linked for one in gpus]
    return Watched(
        read_ns=min((one.read_ns for one in gpus), default=0),
        reset=min((at for at in resets if at), default=None) if all(resets) else None,
        calm=max((at for at in calm if at), default=None) if all(calm) else None,
        linked=max((at for at in linked if at), default=None) if all(linked) else None,
    )


def heal(
    log: FaultLog, decisions: Mapping[Key, Decision], watched: Mapping[int, Watched], now: Instant
) -> tuple[FaultLog, int | None]:
    """The faults after this look, and when to look again for the next to end.

    Args:
        decisions: What each fault means; one that has none is not yet judged.
    """
    if not log.faults:
        return log, None
    faults: dict[Key, Fault] = {}
    due: list[int] = []
    for key, fault in log.faults.items():
        decision = decisions.get(key)
        if fault.healed or decision is None:
            if not _is_forgotten(fault, now):
                faults[key] = fault
            continue
        ends_ns = min(_ends(fault, decision.cure, watched.get(key.number, Watched()), now), default=None)
        if ends_ns is None or ends_ns > now.mono_ns:
            faults[key] = fault
            due += [ends_ns] if ends_ns is not None else []
        else:
            faults[key] = replace(fault, healed=now, judged=decision)
    return replace(log, faults=faults), min(due, default=None)


def _is_forgotten(fault: Fault, now: Instant) -> bool:
    """A mere word is remembered for a day: it may come back, and what comes back is more than a word."""
    return fault.healed is not None and fault.is_word and now.mono_ns - fault.last.mono_ns >= DAY_NS


def _ends(fault: Fault, cure: Cure, seen: Watched, now: Instant) -> Iterator[int]:
    """Each moment at which the fault is over, or may be, if nothing new happens until then."""
    last_ns = fault.last.mono_ns
    if cure is Cure.EXPIRES:
        yield last_ns + EXPIRE_NS
    if cure in _BY_RESET and seen.reset and seen.reset.mono_ns > last_ns:
        yield seen.reset.mono_ns
    if cure in _BY_RESET and seen.renewed:
        yield now.mono_ns + NS
    # Of a fault that came while the agent was away nobody saw whether a reset followed; the driver knows.
    calm = cure in _BY_CALM or (cure is Cure.RESET and fault.before_us)
    for since in (seen.calm if calm else None, seen.linked if cure is Cure.LINKS_UP else None):
        if since is not None:
            settled_ns = max(since.mono_ns, last_ns + SETTLE_NS)
            yield settled_ns if not now.mono_ns >= settled_ns > seen.read_ns else now.mono_ns + NS
