"""Uses of devices, on paper: what is told and how devices are, look for look."""

from collections.abc import Iterable

from claims_paper import NAMESPACE, at, device, heard, prepared, told, use

from agent.devices.consumers.consumer_map import consumer_map
from agent.devices.consumers.usage import Step, Uses, follow
from agent.model.claim import ClaimRef
from agent.model.claim_sources import KnownPod, ListedPod, Origin, PodRef, PreparedClaim, SourceAnswers
from agent.model.consumers import ConsumerMap
from agent.model.health import Health, Severity
from agent.model.reading import Absence
from agent.model.time import Instant
from agent.model.uses import DeviceState, DeviceUsage, Ending, UsageEnd

GOOD = DeviceState(Health.HEALTHY, Severity.OK, since_s=1.0)
SLOW = DeviceState(Health.HEALTHY, Severity.DEGRADED, "gpu.heat", "91 C, 90 allowed", 2.0)
LOST = DeviceState(Health.UNHEALTHY, Severity.UNHEALTHY, "gpu.xid.79", "1 time", 3.0)

TRAIN = prepared("c-1", use("gpu-0", "gpus"), pods=["p-1"], name="gpus")
"""A claim with one device, prepared for one pod."""


def known(
    *claims: PreparedClaim,
    pods: Iterable[KnownPod] = (),
    listed: Iterable[ListedPod] = (),
    torn: bool = False,
) -> ConsumerMap:
    """What the kubelet says: all of its claims, unless its checkpoint could not be read to the end."""
    wrong = ("claim 7: is cut off",) if torn else ()
    checkpoint = told(Origin.CHECKPOINT, claims, 1, wrong=wrong)
    rest = heard(pods_api=pods, podresources=listed)
    return consumer_map(SourceAnswers(prepared=(checkpoint,), listed=rest.listed, pods=rest.pods))


UNREADABLE = consumer_map(
    SourceAnswers(
        prepared=(told(Origin.CHECKPOINT, (), absence=Absence.UNREADABLE, why="Input/output error"),)
    )
)
GONE = consumer_map(
    SourceAnswers(prepared=(told(Origin.CHECKPOINT, (), absence=Absence.ABSENT, why="not there"),))
)
NOT_ASKED = ConsumerMap()


class Looks:
    """One look after the other, a second apart."""

    def __init__(self, uses: Uses | None = None, first: int = 10) -> None:
        self.uses = uses or Uses("life")
        self.second = first - 1
        self.step = Step(self.uses, (), ())
        self.ended: list[DeviceUsage] = []

    @property
    def now(self) -> Instant:
        return at(self.second)

    def look(self, map_: ConsumerMap, state: DeviceState = GOOD) -> tuple[DeviceUsage, ...]:
        """What began, changed or ended."""
        self.second += 1
        self.step = follow(self.uses, map_, lambda _: state, self.now)
        self.uses = self.step.uses
        self.ended += [one for one in self.step.changed if one.ended]
        return self.step.changed

    def only(self, map_: ConsumerMap, state: DeviceState = GOOD) -> DeviceUsage:
        """The same of one."""
        (changed,) = self.look(map_, state)
        return changed


def a_use(number: int = 1, *, goes_on: bool = False, **more: object) -> DeviceUsage:
    """One that ran for an hour, and a minute ago was seen to have ended."""
    values: dict[str, object] = {
        "id": f"life-{number}",
        "pod": PodRef(NAMESPACE, f"train-{number}", f"p-{number}"),
        "claim": ClaimRef(NAMESPACE, "gpus", f"c-{number}"),
        "device": device(f"gpu-{number}"),
        "began": at(0),
        "before": False,
        "state": GOOD,
        "worst": GOOD,
        "told_by": (Origin.CHECKPOINT,),
        "requests": ("gpus",),
        "containers": ("main",),
        "owner": "Job train",
        "ended": None if goes_on else UsageEnd(Ending.RELEASED, at(3599).wall_s, at(3600).wall_s, 3600.0),
    }
    return DeviceUsage(**{**values, **more})  # type: ignore[arg-type]
