"""The checked-in messages are what ``proto/`` says, and ``proto/`` is the kubelet's contract."""

from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from wire.google import FILES, described

from agent.serve.rpc import generate
from agent.serve.rpc.gen.health_v1 import v1
from agent.serve.rpc.gen.health_v1alpha1 import v1alpha1

TYPES = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_ENUM: "enum",
    FieldDescriptor.TYPE_MESSAGE: "message",
}

# kubelet-facing facts: KEP-4680 as released, v1alpha1 from 1.34 and v1 from 1.37
DEVICE_HEALTH = {
    "device": (1, "message"),
    "health": (2, "enum"),
    "last_updated_time": (3, "int64"),
    "health_check_timeout_seconds": (4, "int64"),
    "message": (5, "string"),
}


def fields(message: Descriptor) -> dict[str, tuple[int, str]]:
    return {field.name: (field.number, TYPES[field.type]) for field in message.fields}


def test_the_checked_in_code_is_what_the_compiler_makes_of_our_files(tmp_path: Path) -> None:
    generate.generate(tmp_path / "gen")
    assert generate.stale(generate.tree(tmp_path / "gen"), generate.tree(generate.GEN)) == []


def test_a_changed_missing_or_surplus_file_counts_as_stale() -> None:
    fresh = {"same": b"1", "changed": b"1", "missing": b"1"}
    checked_in = {"same": b"1", "changed": b"2", "surplus": b"1"}
    assert generate.stale(fresh, checked_in) == ["changed", "missing", "surplus"]


def test_every_proto_file_is_generated() -> None:
    found = {str(path.relative_to(generate.PROTO)) for path in generate.PROTO.rglob("*.proto")}
    assert found == set(generate.APIS.values()) == set(FILES.values())


@pytest.mark.parametrize("version", ["v1", "v1alpha1"])
def test_the_health_api_is_the_kubelets(version: str) -> None:
    file = described()[version]
    assert file.package == version
    assert fields(file.message_types_by_name["NodeWatchResourcesRequest"]) == {}
    response = file.message_types_by_name["NodeWatchResourcesResponse"]
    assert fields(response) == {"devices": (1, "message")}
    assert response.fields_by_name["devices"].is_repeated
    assert fields(file.message_types_by_name["DeviceHealth"]) == DEVICE_HEALTH
    identifier = file.message_types_by_name["DeviceIdentifier"]
    assert fields(identifier) == {"pool_name": (1, "string"), "device_name": (2, "string")}
    statuses = {value.name: value.number for value in file.enum_types_by_name["HealthStatus"].values}
    assert statuses == {"UNKNOWN": 0, "HEALTHY": 1, "UNHEALTHY": 2}
    method = file.services_by_name["DRAResourceHealth"].methods_by_name["NodeWatchResources"]
    assert (method.client_streaming, method.server_streaming) == (False, True)


def test_the_generated_servers_have_the_kubelets_method_paths() -> None:
    assert list(v1.DraResourceHealthBase().__mapping__()) == ["/v1.DRAResourceHealth/NodeWatchResources"]
    assert list(v1alpha1.DraResourceHealthBase().__mapping__()) == [
        "/v1alpha1.DRAResourceHealth/NodeWatchResources"
    ]
