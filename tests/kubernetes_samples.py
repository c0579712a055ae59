"""Bytes and texts written by Kubernetes' own packages: k8s.io/api 0.37.2 and kubelet 1.37.1."""

import json
from typing import Any

POD = bytes.fromhex(
    "0ae0010a07747261696e2d3012001a067465616d2d6122002a2436663063336634652d303030312d346161612d386262622d3030"
    "30303030303030303031320434373131380342080880e2cfaa0610004a0808e4e2cfaa0610005a0c0a036170701205747261696e"
    "62220a1b6b756265726e657465732e696f2f636f6e6669672e736f7572636512036170696a210a034a6f621a05747261696e2205"
    "6a6f622d312a0862617463682f76313001380172106578616d706c652e636f6d2f6b6565708a011f0a076b75626563746c12001a"
    "0032003a0c0a0a7b22663a61223a7b7d7d420012db020a090a0176120412020a0012720a046d61696e1201692201612a0042520a"
    "170a0d6875676570616765732d324d6912060a0436344d69120d0a0363707512060a043530306d120f0a066d656d6f727912050a"
    "033147691a080a046770757312001a0d0a0673686172656412036e69636a007200800100880100900100a20100121d0a0469646c"
    "651201692a0042006a007200800100880100900100a201001a054e65766572320042004a0052066e6f64652d3158006000680082"
    "01008a01009a0100a201350a04736964651201692a00420f1a0d0a04677075731205736d616c6c6a007200800100880100900100"
    "a20100c20106416c77617973c20100c801fbffffffffffffffff0182020c0a0363707512050a0331306dba02140a046770757322"
    "0c6770752d74656d706c617465ba020e0a067368617265641a046e696373c2020c120a0a0363707512030a0132da02090a07776f"
    "726b6572731add030a0752756e6e696e6712320a10506f64526573697a6550656e64696e671204547275651a0022080894e2cfaa"
    "0610002a084465666572726564320038001a0022002a0032003a08088ae2cfaa061000424b0a046d61696e120c120a0a080894e2"
    "cfaa0610001a002001280032003a004211636f6e7461696e6572643a2f2f61613131520a0a0363707512030a01315a0c120a0a03"
    "63707512030a0131422a0a0469646c6512160a140a1043726173684c6f6f704261636b4f666612001a002000280032003a004200"
    "4a09427572737461626c65523e0a0473696465121e1a1c08ffffffffffffffffff0110001a054572726f7222002a0032003a001a"
    "002000280032003a00420c6372692d6f3a2f2f626232325a0072007a1a0a04677075731212747261696e2d302d677075732d7837"
    "6b32708801039201500a2e0a046d61696e120f6578616d706c652e636f6d2f6770751a15636f6e7461696e65722d302d72657175"
    "6573742d30121e747261696e2d302d657874656e6465642d7265736f75726365732d7139779a010f0a066d656d6f727912050a03"
    "334769a2010c0a0a0a0363707512030a0134aa01300a046e69637312046d61696e220a0a0363707512030a01352a160a066d656d"
    "6f727912050a03314d691a050a03324d69"
)
"""v1.Pod written by ``Marshal``, with most fields of a pod."""

_POD_JSON = (
    '{"metadata":{"name":"train-0","namespace":"team-a","uid":"6f0c3f4e-0001-4aaa-8bbb-0000000000'
    '01","resourceVersion":"4711","generation":3,"creationTimestamp":"2023-11-14T22:13:20Z","dele'
    'tionTimestamp":"2023-11-14T22:15:00Z","labels":{"app":"train"},"annotations":{"kubernetes.io'
    '/config.source":"api"},"ownerReferences":[{"apiVersion":"batch/v1","kind":"Job","name":"trai'
    'n","uid":"job-1","controller":true,"blockOwnerDeletion":true}],"finalizers":["example.com/ke'
    'ep"]},"spec":{"volumes":[{"name":"v","emptyDir":{}}],"initContainers":[{"name":"side","image'
    '":"i","resources":{"claims":[{"name":"gpus","request":"small"}]},"restartPolicy":"Always"}],'
    '"containers":[{"name":"main","image":"i","args":["a"],"resources":{"limits":{"hugepages-2Mi"'
    ':"64Mi"},"requests":{"cpu":"500m","memory":"1Gi"},"claims":[{"name":"gpus"},{"name":"shared"'
    ',"request":"nic"}]}},{"name":"idle","image":"i","resources":{}}],"restartPolicy":"Never","no'
    'deName":"node-1","priority":-5,"overhead":{"cpu":"10m"},"resourceClaims":[{"name":"gpus","re'
    'sourceClaimTemplateName":"gpu-template"},{"name":"shared","resourceClaimName":"nics"}],"reso'
    'urces":{"requests":{"cpu":"2"}},"schedulingGroup":{"podGroupName":"workers"}},"status":{"obs'
    'ervedGeneration":3,"phase":"Running","conditions":[{"type":"PodResizePending","status":"True'
    '","lastProbeTime":null,"lastTransitionTime":"2023-11-14T22:13:40Z","reason":"Deferred"}],"st'
    'artTime":"2023-11-14T22:13:30Z","initContainerStatuses":[{"name":"side","state":{"terminated'
    '":{"exitCode":-1,"reason":"Error","startedAt":null,"finishedAt":null}},"lastState":{},"ready'
    '":false,"restartCount":0,"image":"","imageID":"","containerID":"cri-o://bb22"}],"containerSt'
    'atuses":[{"name":"main","state":{"running":{"startedAt":"2023-11-14T22:13:40Z"}},"lastState"'
    ':{},"ready":true,"restartCount":0,"image":"","imageID":"","containerID":"containerd://aa11",'
    '"allocatedResources":{"cpu":"1"},"resources":{"requests":{"cpu":"1"}}},{"name":"idle","state'
    '":{"waiting":{"reason":"CrashLoopBackOff"}},"lastState":{},"ready":false,"restartCount":0,"i'
    'mage":"","imageID":""}],"qosClass":"Burstable","resourceClaimStatuses":[{"name":"gpus","reso'
    'urceClaimName":"train-0-gpus-x7k2p"}],"extendedResourceClaimStatus":{"requestMappings":[{"co'
    'ntainerName":"main","resourceName":"example.com/gpu","requestName":"container-0-request-0"}]'
    ',"resourceClaimName":"train-0-extended-resources-q9w"},"allocatedResources":{"memory":"3Gi"}'
    ',"resources":{"limits":{"cpu":"4"}},"nodeAllocatableResourceClaimStatuses":[{"resourceClaimN'
    'ame":"nics","containers":["main"],"mapping":[{"name":"cpu","quantity":"5"}],"overhead":[{"na'
    'me":"memory","perPod":"1Mi","perContainer":"2Mi"}]}]}}'
)
"""This pod as JSON."""


def pod_json() -> dict[str, Any]:
    """Return this pod as an object, as kubectl shows it."""
    pod: dict[str, Any] = json.loads(_POD_JSON)
    return {"apiVersion": "v1", "kind": "Pod", **pod}


CHECKPOINT = (
    '{"Data":"{\\"kind\\":\\"DRACheckpoint\\",\\"apiVersion\\":\\"checkpoint.dra.kubelet.k8s.io/v1\\",\\"C'
    'laimInfoStateList\\":[{\\"ClaimUID\\":\\"u-1\\",\\"ClaimName\\":\\"train\\",\\"Namespace\\":\\"team-a\\",'
    '\\"PodUIDs\\":{\\"p-1\\":{},\\"p-2\\":{}},\\"DriverState\\":{\\"gpu.example.com\\":{\\"Devices\\":[{\\"Po'
    'olName\\":\\"node-1\\",\\"DeviceName\\":\\"gpu-0\\",\\"ShareID\\":\\"aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaa'
    'aaa\\",\\"RequestNames\\":[\\"big/large\\"],\\"CDIDeviceIDs\\":[\\"example.com/gpu=\\\\u003c0\\\\u00261\\'
    '\\u003e\\\\u2028é\\"]}]},\\"nic.example.com\\":{\\"Devices\\":null},\\"tag.example.com\\":{\\"Devices\\"'
    ':null,\\"skipNodeOperations\\":[\\"*\\"]}}},{\\"ClaimUID\\":\\"u-2\\",\\"ClaimName\\":\\"none\\",\\"Names'
    'pace\\":\\"team-a\\",\\"PodUIDs\\":null,\\"DriverState\\":null}]}","Checksum":186374305}'
)
"""Two claims: one with devices, a waiting driver and a skipped driver; one empty."""
EMPTY_CHECKPOINT = (
    '{"Data":"{\\"kind\\":\\"DRACheckpoint\\",\\"apiVersion\\":\\"checkpoint.dra.kubelet.k8s.io/v1\\",\\"C'
    'laimInfoStateList\\":null}","Checksum":4010664294}'
)
"""Checkpoint without claims."""
HEALTH_STATE = (
    '{"gpu.example.com":{"Devices":{"node-1/gpu-0":{"PoolName":"node-1","DeviceName":"gpu-0","Hea'
    'lth":"Healthy","LastUpdated":"2023-11-14T23:43:20.123456789+01:30","HealthCheckTimeout":4500'
    '0000000,"Message":""},"node-1/gpu-1":{"PoolName":"node-1","DeviceName":"gpu-1","Health":"Unh'
    'ealthy","LastUpdated":"2023-11-14T22:13:20Z","HealthCheckTimeout":0,"Message":"XID 79 \\u003c'
    'bus\\u003e"},"node-1/gpu-2":{"PoolName":"node-1","DeviceName":"gpu-2","Health":"Unknown","Las'
    'tUpdated":"0001-01-01T00:00:00Z","HealthCheckTimeout":0,"Message":""}}},"nic.example.com":{"'
    'Devices":null}}'
)
"""Health of three devices of one driver and none of another."""
