"""ResourceClaims parsed into the claim that a driver prepares: devices and parameters."""

import copy
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model.claim import Claim, ClaimConfig, ClaimDevice, ClaimRef
from agent.prepare.claim_parser import (
    DEPTH_MAX,
    PARAMETERS_MAX_BYTES,
    Parameters,
    configs_for,
    decode_parameters,
    parse_claim,
)
from agent.prepare.errors import BadConfigError, DriverError, TransientError

DRIVER = "gpu.example.com"
BRACES = len('{"text":""}')
REF = ClaimRef("team-a", "train", "0f5a1c7e-1111-4222-8333-444455556666")


def result(request: str, device: str, driver: str = DRIVER, **more: Any) -> dict[str, Any]:
    return {"request": request, "driver": driver, "pool": "node-1", "device": device, **more}


def opaque(
    parameters: Any, *requests: str, source: str = "FromClaim", driver: str = DRIVER
) -> dict[str, Any]:
    return {
        "source": source,
        "requests": list(requests),
        "opaque": {"driver": driver, "parameters": parameters},
    }


def claim_of(results: list[Any], configs: list[Any] | None = None, version: str = "v1") -> dict[str, Any]:
    """Return a claim as the API server writes it."""
    devices: dict[str, Any] = {"results": results}
    if configs is not None:
        devices["config"] = configs
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceClaim",
        "metadata": {"namespace": REF.namespace, "name": REF.name, "uid": REF.uid, "resourceVersion": "81"},
        "spec": {"devices": {"requests": [{"name": "g", "exactly": {"deviceClassName": DRIVER}}]}},
        "status": {
            "allocation": {"devices": devices},
            "reservedFor": [{"resource": "pods", "name": "train-0", "uid": "u"}],
        },
    }


def parse_error(obj: Any, ref: ClaimRef | None = None) -> DriverError:
    with pytest.raises(DriverError) as caught:
        parse_claim(obj, DRIVER, ref)
    return caught.value


# --- accepted claims ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2", "v1"])
def test_every_served_version_gives_the_same_claim(version: str) -> None:
    obj = claim_of([result("g", "gpu-3")], [opaque({"kind": "K"}, "g")], version)
    assert parse_claim(obj, DRIVER, REF) == Claim(
        *REF,
        devices=(ClaimDevice("g", DRIVER, "node-1", "gpu-3"),),
        configs=(ClaimConfig("FromClaim", ("g",), {"kind": "K"}),),
    )


def test_only_results_of_the_driver_are_kept_in_order() -> None:
    obj = claim_of([result("b", "gpu-3"), result("n", "nic-0", "nic.example.com"), result("a", "gpu-1")])
    assert [device.device for device in parse_claim(obj, DRIVER).devices] == ["gpu-3", "gpu-1"]


def test_only_parameters_of_the_driver_are_kept() -> None:
    foreign = opaque("not even an object", driver="nic.example.com")
    newer = {"source": "FromClaim", "typed": {"what": "a kind of parameters that is not opaque"}}
    obj = claim_of([result("g", "gpu-3")], [foreign, newer, opaque({"kind": "K"})])
    assert [config.parameters for config in parse_claim(obj, DRIVER).configs] == [{"kind": "K"}]


def test_claim_parameters_come_after_class_parameters() -> None:
    configs = [
        opaque({"n": 1}, source="FromClaim"),
        opaque({"n": 2}, source="FromClass"),
        opaque({"n": 3}, source="FromClaim"),
    ]
    claim = parse_claim(claim_of([result("g", "gpu-3")], configs), DRIVER)
    assert [config.parameters["n"] for config in claim.configs] == [2, 1, 3]


def test_shares_alternatives_and_admin_access_are_kept() -> None:
    more = {"shareID": "aaaa-bbbb", "consumedCapacity": {"memory": "10Gi", "cores": 4}, "adminAccess": True}
    (device,) = parse_claim(claim_of([result("g/small", "gpu-3", **more)]), DRIVER).devices
    assert device.request == "g/small"
    assert device.share_id == "aaaa-bbbb"
    assert device.consumed == (("cores", "4"), ("memory", "10Gi"))
    assert device.admin


@pytest.mark.parametrize(
    ("tolerations", "tolerates"),
    [
        (None, False),
        ([{"operator": "Exists", "effect": "None"}], False),
        ([{"operator": "Exists"}], True),
        ([{"key": "example.com/sick", "effect": "None"}, {"key": "a/b", "effect": "NoSchedule"}], True),
    ],
)
def test_toleration_of_a_taint_that_keeps_pods_off_accepts_faults(
    tolerations: object, tolerates: bool
) -> None:
    claim = parse_claim(claim_of([result("g", "gpu-3", tolerations=tolerations)]), DRIVER)
    assert claim.devices[0].accepts_faults == tolerates
    assert claim.fingerprint == parse_claim(claim_of([result("g", "gpu-3")]), DRIVER).fingerprint


def test_unknown_fields_are_ignored() -> None:
    obj = claim_of(
        [result("g", "gpu-3", bindingConditions=["ready"], tolerations=[{"operator": "Exists"}], new=[1])]
    )
    obj["spec"]["reservedFor"] = {"resource": "podgroups", "name": "gang"}  # KEP-5194, which no release has
    obj["status"]["allocation"]["reservedForAnyPod"] = True
    obj["status"]["reservedFor"] = [
        {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "gang"}
    ]
    obj["status"]["devices"] = [{"driver": DRIVER, "conditions": []}]
    assert parse_claim(obj, DRIVER, REF).devices[0].device == "gpu-3"


def test_null_fields_count_as_missing() -> None:
    obj = claim_of([result("g", "gpu-3", shareID=None, adminAccess=None, consumedCapacity=None)])
    obj["status"]["allocation"]["devices"]["config"] = None
    assert parse_claim(obj, DRIVER).devices[0] == ClaimDevice("g", DRIVER, "node-1", "gpu-3")


# --- refused claims ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [None, {}, {"allocation": None}, {"reservedFor": []}])
def test_claim_without_allocation_is_transient(status: Any) -> None:
    obj = claim_of([]) | {"status": status}
    error = parse_error(obj)
    assert isinstance(error, TransientError)
    assert error.code == "claim.unallocated"


def test_recreated_claim_is_transient() -> None:
    error = parse_error(claim_of([result("g", "gpu-3")]), REF._replace(uid="another"))
    assert isinstance(error, TransientError)
    assert error.code == "claim.uid_mismatch"
    assert "another" in error.summary
    assert REF.uid in error.summary


def test_claim_of_another_name_is_malformed() -> None:
    error = parse_error(claim_of([result("g", "gpu-3")]), REF._replace(name="serve"))
    assert error.code == "claim.malformed"
    assert error.summary == "metadata: is of claim team-a/train, but the kubelet requested team-a/serve"


@pytest.mark.parametrize("results", [[], [result("n", "nic-0", "nic.example.com")]])
def test_claim_without_result_for_the_driver_is_transient(results: list[Any]) -> None:
    error = parse_error(claim_of(results))
    assert isinstance(error, TransientError)
    assert error.code == "claim.no_result_for_driver"


NOT_A_NAME = "is not a name: 1 to 253 ASCII characters without spaces"

MALFORMED: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("kind",), "List", "'List' of 'resource.k8s.io/v1' is not a ResourceClaim of resource.k8s.io"),
    (("apiVersion",), "apps/v1", "'ResourceClaim' of 'apps/v1' is not a ResourceClaim of resource.k8s.io"),
    (("apiVersion",), None, "'ResourceClaim' of None is not a ResourceClaim of resource.k8s.io"),
    (("metadata",), [], "metadata: is a list, not an object"),
    (("metadata", "uid"), "", f"metadata.uid: '' {NOT_A_NAME}"),
    (("metadata", "name"), 7, f"metadata.name: 7 {NOT_A_NAME}"),
    (("metadata", "namespace"), "a b", f"metadata.namespace: 'a b' {NOT_A_NAME}"),
    (("status",), "ready", "status: is text, not an object"),
    (("status", "allocation"), True, "status.allocation: is a boolean, not an object"),
    (
        ("status", "allocation", "devices", "results"),
        {},
        "status.allocation.devices.results: is not a list of objects",
    ),
    (
        ("status", "allocation", "devices", "results"),
        ["g"],
        "status.allocation.devices.results: is not a list of objects",
    ),
    (
        ("status", "allocation", "devices", "results", 0, "device"),
        "gpu\n3",
        rf"status.allocation.devices.results[0].device: 'gpu\n3' {NOT_A_NAME}",
    ),
    (
        ("status", "allocation", "devices", "results", 0, "pool"),
        "p" * 254,
        f"status.allocation.devices.results[0].pool: '{'p' * 60}... {NOT_A_NAME}",
    ),
    (
        ("status", "allocation", "devices", "results", 0, "adminAccess"),
        "yes",
        "status.allocation.devices.results[0].adminAccess: 'yes' is neither true nor false",
    ),
    (
        ("status", "allocation", "devices", "config"),
        [{"source": "FromClaim", "requests": "g", "opaque": {"driver": DRIVER, "parameters": {}}}],
        "status.allocation.devices.config[0].requests: is not a list of request names",
    ),
    (
        ("status", "allocation", "devices", "config"),
        [{"source": "FromClaim", "requests": [1], "opaque": {"driver": DRIVER, "parameters": {}}}],
        "status.allocation.devices.config[0].requests: is not a list of request names",
    ),
    (
        ("status", "allocation", "devices", "config"),
        [{"opaque": {"driver": DRIVER, "parameters": {}}}],
        f"status.allocation.devices.config[0].source: None {NOT_A_NAME}",
    ),
]


@pytest.mark.parametrize(("place", "value", "text"), MALFORMED)
def test_malformed_claim_is_transient_and_names_the_field(
    place: tuple[str | int, ...], value: Any, text: str
) -> None:
    obj = claim_of([result("g", "gpu-3")])
    at: Any = obj
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    error = parse_error(obj)
    assert isinstance(error, TransientError)
    assert error.code == "claim.malformed"
    assert error.summary == text


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (None, "is nothing, not an object"),
        ([1], "is a list, not an object"),
        (
            {"text": "x" * PARAMETERS_MAX_BYTES},
            f"parameters of {PARAMETERS_MAX_BYTES + BRACES} bytes, limit {PARAMETERS_MAX_BYTES}",
        ),
        ({"when": object()}, "has values that JSON cannot represent"),
    ],
)
def test_invalid_parameters_are_bad_config(parameters: Any, text: str) -> None:
    error = parse_error(claim_of([result("g", "gpu-3")], [opaque(parameters)]))
    assert isinstance(error, BadConfigError)
    assert error.code == "config.decode"
    assert error.summary == f"status.allocation.devices.config[0].opaque.parameters: {text}"


def test_parameters_of_the_size_limit_are_accepted() -> None:
    parameters = {"text": "x" * (PARAMETERS_MAX_BYTES - BRACES)}
    claim = parse_claim(claim_of([result("g", "gpu-3")], [opaque(parameters)]), DRIVER)
    assert claim.configs[0].parameters == parameters


@pytest.mark.parametrize("depth", [DEPTH_MAX + 1, 2000])
def test_deeply_nested_parameters_are_rejected(depth: int) -> None:
    parameters: dict[str, Any] = {}
    for _ in range(depth):
        parameters = {"a": parameters}
    error = parse_error(claim_of([result("g", "gpu-3")], [opaque(parameters)]))
    assert error.summary.endswith(f"is nested deeper than {DEPTH_MAX} levels")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
PLACES = [place for place, _, _ in MALFORMED] + [("status", "allocation", "devices"), ("metadata", "labels")]


@given(st.sampled_from(PLACES), JSON)
def test_any_object_gives_a_claim_or_a_driver_error(place: tuple[str | int, ...], value: Any) -> None:
    obj = copy.deepcopy(claim_of([result("g", "gpu-3")], [opaque({"kind": "K"})]))
    at: Any = obj
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    summary = ""
    try:
        claim = parse_claim(json.loads(json.dumps(obj)), DRIVER)
        assert claim.devices
        assert claim.fingerprint
    except DriverError as error:
        summary = error.summary
    assert not summary or summary.isprintable()  # one line


# --- parameters --------------------------------------------------------------------------------------------


class Sharing(Parameters, frozen=True):
    ways: int = 1


class GpuParameters(Parameters, frozen=True):
    mode: str
    sharing: Sharing = Sharing()

    def __post_init__(self) -> None:
        if self.mode not in {"whole", "shared"}:
            raise ValueError(f"mode {self.mode!r} is neither whole nor shared")


KINDS = {"gpu.example.com/v1/GpuParameters": GpuParameters}


def config(*requests: str, **fields: Any) -> ClaimConfig:
    given = {"apiVersion": "gpu.example.com/v1", "kind": "GpuParameters", "mode": "whole", **fields}
    return ClaimConfig(
        "FromClaim", requests, {key: value for key, value in given.items() if value is not None}
    )


def test_parameters_are_decoded_into_the_drivers_type() -> None:
    assert decode_parameters(config(sharing={"ways": 4}), KINDS) == GpuParameters(
        mode="whole", sharing=Sharing(ways=4)
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kind": None}, "the parameters have no kind"),
        ({"apiVersion": ""}, "the parameters have no apiVersion"),
        (
            {"kind": "GpuParameter"},
            "'gpu.example.com/v1/GpuParameter' is not one of the driver's kinds; "
            "did you mean 'gpu.example.com/v1/GpuParameters'?",
        ),
        (
            {"apiVersion": "other.example/v1", "kind": "Thing"},
            "'other.example/v1/Thing' is not one of the driver's kinds",
        ),
        ({"mode": None}, "GpuParameters: object missing required field `mode`"),
        ({"mode": 7}, "GpuParameters: expected `str`, got `int` - at `$.mode`"),
        ({"mode": "half"}, "GpuParameters: mode 'half' is neither whole nor shared"),
        ({"modes": "x"}, "GpuParameters: object contains unknown field `modes`"),
        ({"mo\ndes": "x"}, "GpuParameters: object contains unknown field `mo?des`"),
        ({"sharing": {"way": 2}}, "GpuParameters: object contains unknown field `way` - at `$.sharing`"),
        ({"sharing": {"ways": "2"}}, "GpuParameters: expected `int`, got `str` - at `$.sharing.ways`"),
    ],
)
def test_unknown_parameters_are_rejected_by_name(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(BadConfigError) as caught:
        decode_parameters(config("g", **fields), KINDS)
    assert caught.value.code == "config.decode"
    assert caught.value.requests == ("g",)
    assert caught.value.summary == text


def test_suggestion_comes_before_the_list_of_kinds() -> None:
    kinds = {f"accelerators.example.com/v1alpha1/{word * 5}Parameters": GpuParameters for word in "ABCDE"}
    (*_, last) = kinds
    with pytest.raises(BadConfigError) as caught:
        decode_parameters(
            config(apiVersion="accelerators.example.com/v1alpha1", kind="EEEEParameters"), kinds
        )
    assert caught.value.summary.endswith(f"did you mean '{last}'?")
    assert len(caught.value.summary) <= 200
    assert caught.value.detail == f"Known kinds: {', '.join(kinds)}"


def test_parameter_types_reject_unknown_fields() -> None:
    assert msgspec.structs.fields(Sharing)
    assert Sharing.__struct_config__.forbid_unknown_fields


def test_last_config_of_a_request_takes_precedence() -> None:
    everywhere, of_g, of_h, of_small = config(), config("g"), config("h"), config("g/small")
    claim = Claim(*REF, configs=(everywhere, of_g, of_h, of_small))
    assert configs_for(claim, "g") == (everywhere, of_g)
    assert configs_for(claim, "g/small") == (everywhere, of_g, of_small)
    assert configs_for(claim, "other") == (everywhere,)
