"""ResourceClaims become what one driver prepares: its devices and parameters, whatever stands beside them."""

import copy
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model.claim import Claim, ClaimConfig, ClaimDevice, ClaimRef
from agent.prepare.claims import DEPTH_MAX, PARAMETERS_BYTES, parse_claim
from agent.prepare.errors import BadConfig, DriverError, TransientError
from agent.prepare.parameters import Parameters, configs_for, decode_parameters

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
    """A claim as the API server writes it."""
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


def refused(obj: Any, ref: ClaimRef | None = None) -> DriverError:
    with pytest.raises(DriverError) as caught:
        parse_claim(obj, DRIVER, ref)
    return caught.value


# --- what is taken -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2", "v1"])
def test_every_served_version_gives_the_same_claim(version: str) -> None:
    obj = claim_of([result("g", "gpu-3")], [opaque({"kind": "K"}, "g")], version)
    assert parse_claim(obj, DRIVER, REF) == Claim(
        *REF,
        devices=(ClaimDevice("g", DRIVER, "node-1", "gpu-3"),),
        configs=(ClaimConfig("FromClaim", ("g",), {"kind": "K"}),),
    )


def test_only_this_drivers_results_are_taken_in_their_order() -> None:
    obj = claim_of([result("b", "gpu-3"), result("n", "nic-0", "nic.example.com"), result("a", "gpu-1")])
    assert [device.device for device in parse_claim(obj, DRIVER).devices] == ["gpu-3", "gpu-1"]


def test_only_this_drivers_parameters_are_looked_at() -> None:
    foreign = opaque("not even an object", driver="nic.example.com")
    newer = {"source": "FromClaim", "typed": {"what": "a kind of parameters that is not opaque"}}
    obj = claim_of([result("g", "gpu-3")], [foreign, newer, opaque({"kind": "K"})])
    assert [config.parameters for config in parse_claim(obj, DRIVER).configs] == [{"kind": "K"}]


def test_what_the_claim_says_comes_after_what_its_class_says() -> None:
    configs = [
        opaque({"n": 1}, source="FromClaim"),
        opaque({"n": 2}, source="FromClass"),
        opaque({"n": 3}, source="FromClaim"),
    ]
    claim = parse_claim(claim_of([result("g", "gpu-3")], configs), DRIVER)
    assert [config.parameters["n"] for config in claim.configs] == [2, 1, 3]


def test_shares_alternatives_and_administration_are_kept() -> None:
    more = {"shareID": "aaaa-bbbb", "consumedCapacity": {"memory": "10Gi", "cores": 4}, "adminAccess": True}
    (device,) = parse_claim(claim_of([result("g/small", "gpu-3", **more)]), DRIVER).devices
    assert device.request == "g/small"
    assert device.share_id == "aaaa-bbbb"
    assert device.consumed == (("cores", "4"), ("memory", "10Gi"))
    assert device.admin


def test_fields_that_are_younger_than_us_do_no_harm() -> None:
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


def test_nulls_are_as_good_as_nothing() -> None:
    obj = claim_of([result("g", "gpu-3", shareID=None, adminAccess=None, consumedCapacity=None)])
    obj["status"]["allocation"]["devices"]["config"] = None
    assert parse_claim(obj, DRIVER).devices[0] == ClaimDevice("g", DRIVER, "node-1", "gpu-3")


# --- what is not -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [None, {}, {"allocation": None}, {"reservedFor": []}])
def test_a_claim_without_an_allocation_may_get_one(status: Any) -> None:
    obj = claim_of([]) | {"status": status}
    error = refused(obj)
    assert isinstance(error, TransientError)
    assert error.code == "claim.unallocated"


def test_a_claim_that_was_made_anew_is_not_the_one_asked_for() -> None:
    error = refused(claim_of([result("g", "gpu-3")]), REF._replace(uid="another"))
    assert isinstance(error, TransientError)
    assert error.code == "claim.uid_mismatch"
    assert "another" in error.summary
    assert REF.uid in error.summary


def test_a_claim_of_another_name_is_no_answer() -> None:
    error = refused(claim_of([result("g", "gpu-3")]), REF._replace(name="serve"))
    assert error.code == "claim.malformed"
    assert error.summary == "metadata: is of team-a/train, not of team-a/serve"


@pytest.mark.parametrize("results", [[], [result("n", "nic-0", "nic.example.com")]])
def test_a_claim_of_other_drivers_alone_has_nothing_for_us(results: list[Any]) -> None:
    error = refused(claim_of(results))
    assert isinstance(error, TransientError)
    assert error.code == "claim.no_result_for_driver"


MALFORMED: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("kind",), "List", "'List' of 'resource.k8s.io/v1' is no ResourceClaim of resource.k8s.io"),
    (("apiVersion",), "apps/v1", "'ResourceClaim' of 'apps/v1' is no ResourceClaim of resource.k8s.io"),
    (("apiVersion",), None, "'ResourceClaim' of None is no ResourceClaim of resource.k8s.io"),
    (("metadata",), [], "metadata: is a list, no object"),
    (("metadata", "uid"), "", "metadata.uid: '' is no name"),
    (("metadata", "name"), 7, "metadata.name: 7 is no name"),
    (("metadata", "namespace"), "a b", "metadata.namespace: 'a b' is no name"),
    (("status",), "ready", "status: is text, no object"),
    (("status", "allocation"), True, "status.allocation: is a truth value, no object"),
    (
        ("status", "allocation", "devices", "results"),
        {},
        "status.allocation.devices.results: is no list of objects",
    ),
    (
        ("status", "allocation", "devices", "results"),
        ["g"],
        "status.allocation.devices.results: is no list of objects",
    ),
    (
        ("status", "allocation", "devices", "results", 0, "device"),
        "gpu\n3",
        r"status.allocation.devices.results[0].device: 'gpu\n3' is no name",
    ),
    (
        ("status", "allocation", "devices", "results", 0, "pool"),
        "p" * 254,
        f"status.allocation.devices.results[0].pool: '{'p' * 60}... is no name",
    ),
    (
        ("status", "allocation", "devices", "results", 0, "adminAccess"),
        "yes",
        "status.allocation.devices.results[0].adminAccess: 'yes' is neither true nor false",
    ),
    (
        ("status", "allocation", "devices", "config"),
        [{"source": "FromClaim", "requests": "g", "opaque": {"driver": DRIVER, "parameters": {}}}],
        "status.allocation.devices.config[0].requests: is no list of names",
    ),
    (
        ("status", "allocation", "devices", "config"),
        [{"source": "FromClaim", "requests": [1], "opaque": {"driver": DRIVER, "parameters": {}}}],
        "status.allocation.devices.config[0].requests: is no list of names",
    ),
    (
        ("status", "allocation", "devices", "config"),
        [{"opaque": {"driver": DRIVER, "parameters": {}}}],
        "status.allocation.devices.config[0].source: None is no name",
    ),
]


@pytest.mark.parametrize(("place", "value", "text"), MALFORMED)
def test_what_is_no_claim_is_named_and_may_be_right_next_time(
    place: tuple[str | int, ...], value: Any, text: str
) -> None:
    obj = claim_of([result("g", "gpu-3")])
    at: Any = obj
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    error = refused(obj)
    assert isinstance(error, TransientError)
    assert error.code == "claim.malformed"
    assert error.summary == text


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (None, "is nothing, no object"),
        ([1], "is a list, no object"),
        ({"text": "x" * PARAMETERS_BYTES}, f"{PARAMETERS_BYTES + BRACES} bytes, limit {PARAMETERS_BYTES}"),
        ({"when": object()}, "has values that JSON has not"),
    ],
)
def test_parameters_that_cannot_be_are_the_users(parameters: Any, text: str) -> None:
    error = refused(claim_of([result("g", "gpu-3")], [opaque(parameters)]))
    assert isinstance(error, BadConfig)
    assert error.code == "config.decode"
    assert error.summary == f"status.allocation.devices.config[0].opaque.parameters: {text}"


def test_parameters_of_exactly_the_limit_are_taken() -> None:
    parameters = {"text": "x" * (PARAMETERS_BYTES - BRACES)}
    claim = parse_claim(claim_of([result("g", "gpu-3")], [opaque(parameters)]), DRIVER)
    assert claim.configs[0].parameters == parameters


@pytest.mark.parametrize("depth", [DEPTH_MAX + 1, 2000])
def test_braces_within_braces_end_somewhere(depth: int) -> None:
    parameters: dict[str, Any] = {}
    for _ in range(depth):
        parameters = {"a": parameters}
    error = refused(claim_of([result("g", "gpu-3")], [opaque(parameters)]))
    assert error.summary.endswith(f"is nested more than {DEPTH_MAX} deep")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
PLACES = [place for place, _, _ in MALFORMED] + [("status", "allocation", "devices"), ("metadata", "labels")]


@given(st.sampled_from(PLACES), JSON)
def test_whatever_stands_anywhere_is_a_claim_or_an_error_of_ours(
    place: tuple[str | int, ...], value: Any
) -> None:
    obj = copy.deepcopy(claim_of([result("g", "gpu-3")], [opaque({"kind": "K"})]))
    at: Any = obj
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    heard = ""
    try:
        claim = parse_claim(json.loads(json.dumps(obj)), DRIVER)
        assert claim.devices
        assert claim.fingerprint
    except DriverError as error:
        heard = error.summary
    assert not heard or heard.isprintable()  # one line


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
    said = {"apiVersion": "gpu.example.com/v1", "kind": "GpuParameters", "mode": "whole", **fields}
    return ClaimConfig(
        "FromClaim", requests, {key: value for key, value in said.items() if value is not None}
    )


def test_parameters_become_the_drivers_own_type() -> None:
    assert decode_parameters(config(sharing={"ways": 4}), KINDS) == GpuParameters(
        mode="whole", sharing=Sharing(ways=4)
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kind": None}, "parameters have no kind"),
        ({"apiVersion": ""}, "parameters have no apiVersion"),
        (
            {"kind": "GpuParameter"},
            "'gpu.example.com/v1/GpuParameter' is none of the driver's kinds; "
            "did you mean 'gpu.example.com/v1/GpuParameters'?",
        ),
        (
            {"apiVersion": "other.example/v1", "kind": "Thing"},
            "'other.example/v1/Thing' is none of the driver's kinds",
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
def test_what_is_not_understood_is_refused_and_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(BadConfig) as caught:
        decode_parameters(config("g", **fields), KINDS)
    assert caught.value.code == "config.decode"
    assert caught.value.requests == ("g",)
    assert caught.value.summary == text


def test_what_was_probably_meant_is_not_lost_behind_all_that_there_is() -> None:
    kinds = {f"accelerators.example.com/v1alpha1/{word * 5}Parameters": GpuParameters for word in "ABCDE"}
    (*_, last) = kinds
    with pytest.raises(BadConfig) as caught:
        decode_parameters(
            config(apiVersion="accelerators.example.com/v1alpha1", kind="EEEEParameters"), kinds
        )
    assert caught.value.summary.endswith(f"did you mean '{last}'?")
    assert len(caught.value.summary) <= 200
    assert caught.value.detail == f"They are {', '.join(kinds)}"


def test_nobody_forgets_to_refuse_unknown_fields() -> None:
    assert msgspec.structs.fields(Sharing)
    assert Sharing.__struct_config__.forbid_unknown_fields


def test_the_last_that_is_meant_for_a_request_outranks_the_others() -> None:
    everywhere, of_g, of_h, of_small = config(), config("g"), config("h"), config("g/small")
    claim = Claim(*REF, configs=(everywhere, of_g, of_h, of_small))
    assert configs_for(claim, "g") == (everywhere, of_g)
    assert configs_for(claim, "g/small") == (everywhere, of_g, of_small)
    assert configs_for(claim, "other") == (everywhere,)
