"""Files of the measured node: all sources can read them, and they are consistent."""

from pathlib import Path

from agent.bench.pods import DRIVER, NAMESPACE, POOL, claim_uid, pod_uid, write_node_files
from agent.devices.consumers.affected import affected, refusals
from agent.devices.consumers.consumer_map import consumer_map
from agent.devices.consumers.kube_objects import claims_from, pods_from
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import PodRef, SourceAnswers
from agent.model.time import Instant
from agent.sources import kube_objects, kubelet_state

NOW = Instant(5_000_000_000, 1_700_000_000.0)


def test_written_pods_and_claims_resolve_without_conflicts(tmp_path: Path) -> None:
    files = write_node_files(tmp_path, 5, 12)
    checkpoint = kubelet_state.read_checkpoint(files.kubelet_dir / kubelet_state.CLAIMS_FILE, NOW)
    pods = pods_from(kube_objects.read_objects(files.pods, kube_objects.POD, NOW))
    claims = claims_from(kube_objects.read_objects(files.claims, kube_objects.CLAIM, NOW))
    known = consumer_map(SourceAnswers(prepared=(checkpoint,), pods=(pods,), claims=(claims,)))
    assert (len(known.pods), len(known.claims), len(known.devices)) == (5, 12, 12)
    assert (known.conflicts, known.missing_sources, refusals(known)) == ((), (), ())
    (consumer,) = affected(known, DeviceRef(DRIVER, POOL, "gpu-11"))
    assert consumer.claim == ClaimRef(NAMESPACE, "claim-11", claim_uid(11))
    assert consumer.pod.ref == PodRef(NAMESPACE, "pod-1", pod_uid(1))
    assert consumer.sure
    assert [use.name for use in consumer.containers] == ["main"]
