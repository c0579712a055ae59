"""Checked-in messages match ``proto/``, and ``proto/`` matches the kubelet's contract."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from wire.google import FILES, load_descriptors
from wire.plugin import DRA, REGISTRATION

from agent.serve.grpc import generate
from agent.serve.grpc.gen.dra_v1.k8s.io.kubelet.pkg.apis.dra import v1 as dra_v1
from agent.serve.grpc.gen.dra_v1beta1.k8s.io.kubelet.pkg.apis.dra import v1beta1 as dra_v1beta1
from agent.serve.grpc.gen.health_v1 import v1
from agent.serve.grpc.gen.health_v1alpha1 import v1alpha1
from agent.serve.grpc.gen.registration_v1 import pluginregistration

TYPES = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_ENUM: "enum",
    FieldDescriptor.TYPE_MESSAGE: "message",
}

PLUGIN_METHODS = ("NodePrepareResources", "NodeUnprepareResources")

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


@pytest.mark.live
def test_checked_in_code_equals_generated_code(tmp_path: Path) -> None:
    generate.generate(tmp_path / "gen")
    assert (
        generate.differing_paths(
            generate.read_python_files(tmp_path / "gen"), generate.read_python_files(generate.GEN)
        )
        == []
    )


def test_stale_returns_changed_missing_and_surplus_files() -> None:
    fresh = {"same": b"1", "changed": b"1", "missing": b"1"}
    checked_in = {"same": b"1", "changed": b"2", "surplus": b"1"}
    assert generate.differing_paths(fresh, checked_in) == ["changed", "missing", "surplus"]


def test_every_proto_file_is_generated() -> None:
    files = {str(path.relative_to(generate.PROTO)) for path in generate.PROTO.rglob("*.proto")}
    assert files == set(generate.APIS.values()) == set(FILES.values())


@pytest.mark.parametrize("version", ["v1", "v1alpha1"])
def test_health_api_equals_that_of_the_kubelet(version: str) -> None:
    file = load_descriptors()[version]
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


def test_generated_health_servers_have_the_kubelets_paths() -> None:
    assert list(v1.DraResourceHealthBase().__mapping__()) == ["/v1.DRAResourceHealth/NodeWatchResources"]
    assert list(v1alpha1.DraResourceHealthBase().__mapping__()) == [
        "/v1alpha1.DRAResourceHealth/NodeWatchResources"
    ]


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_plugin_api_equals_that_of_the_kubelet(version: str) -> None:
    file = load_descriptors()[f"{DRA}.{version}"]
    messages = file.message_types_by_name
    assert fields(messages["Claim"]) == {
        "namespace": (1, "string"),
        "uid": (2, "string"),
        "name": (3, "string"),
    }
    device = {
        "request_names": (1, "string"),
        "pool_name": (2, "string"),
        "device_name": (3, "string"),
        "cdi_device_ids": (4, "string"),
    }
    assert fields(messages["Device"]) == device | ({"share_id": (5, "string")} if version == "v1" else {})
    repeated = {field.name for field in messages["Device"].fields if field.is_repeated}
    assert repeated == {"request_names", "cdi_device_ids"}
    if version == "v1":
        assert messages["Device"].fields_by_name["share_id"].has_presence
    assert fields(messages["NodePrepareResourceResponse"]) == {
        "devices": (1, "message"),
        "error": (2, "string"),
    }
    assert fields(messages["NodeUnprepareResourceResponse"]) == {"error": (1, "string")}
    for name in ("Prepare", "Unprepare"):
        request, response = (messages[f"Node{name}Resources{end}"] for end in ("Request", "Response"))
        assert fields(request) == fields(response) == {"claims": (1, "message")}
        assert request.fields_by_name["claims"].message_type is messages["Claim"]
        entry = response.fields_by_name["claims"].message_type
        assert entry.GetOptions().map_entry
        assert fields(entry) == {"key": (1, "string"), "value": (2, "message")}
        assert entry.fields_by_name["value"].message_type is messages[f"Node{name}ResourceResponse"]
    methods = file.services_by_name["DRAPlugin"].methods
    assert [method.name for method in methods] == ["NodePrepareResources", "NodeUnprepareResources"]


def test_registration_api_equals_that_of_the_kubelet() -> None:
    file = load_descriptors()["pluginregistration"]
    messages = file.message_types_by_name
    assert fields(messages["PluginInfo"]) == {
        "type": (1, "string"),
        "name": (2, "string"),
        "endpoint": (3, "string"),
        "supported_versions": (4, "string"),
    }
    assert messages["PluginInfo"].fields_by_name["supported_versions"].is_repeated
    assert fields(messages["RegistrationStatus"]) == {
        "plugin_registered": (1, "bool"),
        "error": (2, "string"),
    }
    methods = file.services_by_name["Registration"].methods
    assert [(method.name, method.input_type.name, method.output_type.name) for method in methods] == [
        ("GetInfo", "InfoRequest", "PluginInfo"),
        ("NotifyRegistrationStatus", "RegistrationStatus", "RegistrationStatusResponse"),
    ]


@pytest.mark.parametrize(
    ("served", "paths"),
    [
        (dra_v1.DraPluginBase(), [f"/{DRA}.v1.DRAPlugin/{name}" for name in PLUGIN_METHODS]),
        (dra_v1beta1.DraPluginBase(), [f"/{DRA}.v1beta1.DRAPlugin/{name}" for name in PLUGIN_METHODS]),
        (
            pluginregistration.RegistrationBase(),
            [f"{REGISTRATION}/{name}" for name in ("GetInfo", "NotifyRegistrationStatus")],
        ),
    ],
)
def test_generated_plugin_servers_have_the_kubelets_paths(served: Any, paths: list[str]) -> None:
    assert list(served.__mapping__()) == paths
