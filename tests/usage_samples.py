"""Device usages for tests: consumer maps, device states, and an observer that steps through them."""

from collections.abc import Iterable

from claim_samples import NAMESPACE, answer, at, device, listed_prepared, source_answers, use

from agent.devices.consumers.consumer_map import build_consumer_map
from agent.devices.consumers.usage import UsageState, UsageUpdate, update_usages
from agent.model.claim import ClaimRef
from agent.model.claim_sources import Origin, PodObject, PodRef, PodResourcesPod, PreparedClaim, SourceAnswers
from agent.model.consumers import ConsumerMap
from agent.model.device_usage import DeviceState, PodDeviceUsage, UsageEnd, UsageEndKind
from agent.model.health import Health, Severity
from agent.model.reading import Absence
from agent.model.time import Instant

GOOD = DeviceState(Health.HEALTHY, Severity.OK, since_s=1.0)
SLOW = DeviceState(Health.HEALTHY, Severity.DEGRADED, "gpu.heat", "91 C, 90 allowed", 2.0)
LOST = DeviceState(Health.UNHEALTHY, Severity.UNHEALTHY, "gpu.xid.79", "1 time", 3.0)

TRAIN = listed_prepared("c-1", use("gpu-0", "gpus"), pods=["p-1"], name="gpus")
"""A claim with one device, prepared for one pod."""


def checkpoint_map(
    *claims: PreparedClaim,
    pods: Iterable[PodObject] = (),
    listed: Iterable[PodResourcesPod] = (),
    truncated: bool = False,
) -> ConsumerMap:
    """Return the map of a checkpoint with these claims, which is incomplete if ``truncated``."""
    invalid_items = ("claim 7: is cut off",) if truncated else ()
    checkpoint = answer(Origin.CHECKPOINT, claims, 1, invalid=invalid_items)
    other_answers = source_answers(pods_api=pods, podresources=listed)
    return build_consumer_map(
        SourceAnswers(prepared=(checkpoint,), listed=other_answers.listed, pods=other_answers.pods)
    )


UNREADABLE = build_consumer_map(
    SourceAnswers(
        prepared=(answer(Origin.CHECKPOINT, (), absence=Absence.UNREADABLE, reason="Input/output error"),)
    )
)
NO_CHECKPOINT = build_consumer_map(
    SourceAnswers(prepared=(answer(Origin.CHECKPOINT, (), absence=Absence.ABSENT, reason="not there"),))
)
NO_SOURCES = ConsumerMap()


class UsageObserver:
    """Observer that applies update_usages() to one consumer map after another, a second apart."""

    def __init__(self, uses: UsageState | None = None, first: int = 10) -> None:
        self.uses = uses or UsageState("run")
        self.second = first - 1
        self.step = UsageUpdate(self.uses, (), ())
        self.ended: list[PodDeviceUsage] = []

    @property
    def now(self) -> Instant:
        return at(self.second)

    def observe(self, map_: ConsumerMap, state: DeviceState = GOOD) -> tuple[PodDeviceUsage, ...]:
        """Step to a consumer map; return the usages that began, changed or ended."""
        self.second += 1
        self.step = update_usages(self.uses, map_, lambda _: state, self.now)
        self.uses = self.step.usages
        self.ended += [usage for usage in self.step.changed if usage.ended]
        return self.step.changed

    def observe_one(self, map_: ConsumerMap, state: DeviceState = GOOD) -> PodDeviceUsage:
        """Step to a consumer map; return the only usage that changed."""
        (changed,) = self.observe(map_, state)
        return changed


def device_usage(number: int = 1, *, active: bool = False, **more: object) -> PodDeviceUsage:
    """Return a usage of one hour that has ended, or still runs if ``active``."""
    values: dict[str, object] = {
        "id": f"run-{number}",
        "pod": PodRef(NAMESPACE, f"train-{number}", f"p-{number}"),
        "claim": ClaimRef(NAMESPACE, "gpus", f"c-{number}"),
        "device": device(f"gpu-{number}"),
        "began": at(0),
        "before": False,
        "state": GOOD,
        "worst": GOOD,
        "sources": (Origin.CHECKPOINT,),
        "requests": ("gpus",),
        "containers": ("main",),
        "owner": "Job train",
        "ended": None
        if active
        else UsageEnd(UsageEndKind.RELEASED, at(3599).wall_s, at(3600).wall_s, 3600.0),
    }
    return PodDeviceUsage(**{**values, **more})  # type: ignore[arg-type]
