"""Files of the measured node: all sources can read them, and they are consistent."""

from pathlib import Path

from agent.bench.file_trees import DRIVER, NAMESPACE, POOL, claim_uid, pod_uid, write_node_files
from agent.devices.consumers.consumer_map import build_consumer_map
from agent.devices.consumers.consumer_queries import affected_pods, refused_pods
from agent.devices.consumers.kube_objects import parse_claims, parse_pods
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import PodRef, SourceAnswers
from agent.model.time import Instant
from agent.sources import kubectl_files, kubelet_files

NOW = Instant(5_000_000_000, 1_700_000_000.0)


def test_written_pods_and_claims_resolve_without_conflicts(tmp_path: Path) -> None:
    files = write_node_files(tmp_path, 5, 12)
    checkpoint = kubelet_files.read_claims_checkpoint(files.kubelet_dir / kubelet_files.CLAIMS_FILE, NOW)
    pods = parse_pods(kubectl_files.read_objects(files.pods, kubectl_files.POD, NOW))
    claims = parse_claims(kubectl_files.read_objects(files.claims, kubectl_files.CLAIM, NOW))
    known = build_consumer_map(SourceAnswers(prepared=(checkpoint,), pods=(pods,), claims=(claims,)))
    assert (len(known.pods), len(known.claims), len(known.devices)) == (5, 12, 12)
    assert (known.conflicts, known.missing_sources, refused_pods(known)) == ((), (), ())
    (consumer,) = affected_pods(known, DeviceRef(DRIVER, POOL, "gpu-11"))
    assert consumer.claim == ClaimRef(NAMESPACE, "claim-11", claim_uid(11))
    assert consumer.pod.ref == PodRef(NAMESPACE, "pod-1", pod_uid(1))
    assert consumer.is_certain
    assert [use.name for use in consumer.containers] == ["main"]
