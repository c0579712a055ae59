"""CDI files as container runtimes read them, and answers to prepare calls as bytes."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire.google import message_class

from agent.conform.answer_decoders import decode_answers
from agent.conform.cdi_schema import cdi_file_error, cdi_id_error, cdi_ids
from agent.conform.session_record import ClaimReply, ReturnedDevice
from agent.store.cdi_files import CdiDevice, CdiMount, CdiNode, write_cdi_spec

EVERYTHING = {
    "cdiVersion": "1.1.0",
    "kind": "example.com/gpu.x",
    "annotations": {"a": "b"},
    "containerEdits": {"env": ["A="]},
    "devices": [
        {
            "name": "0-a:b.c",
            "annotations": {},
            "containerEdits": {
                "env": ["A=1=2"],
                "deviceNodes": [
                    {
                        "path": "/dev/a",
                        "hostPath": "/dev/b",
                        "type": "c",
                        "major": 195,
                        "minor": 0,
                        "fileMode": 432,
                        "permissions": "rw",
                        "uid": 0,
                        "gid": 0,
                    }
                ],
                "netDevices": [{"hostInterfaceName": "eth0", "name": "eth1"}],
                "mounts": [{"hostPath": "/a", "containerPath": "/b", "options": ["ro"], "type": "bind"}],
                "hooks": [{"hookName": "createRuntime", "path": "/bin/a", "args": ["a"], "timeout": 5}],
                "intelRdt": {"closID": "a", "schemata": ["L2:0=f"], "enableMonitoring": True},
                "additionalGids": [44],
            },
        }
    ],
}


def cdi_file_with(**changes: object) -> dict[str, object]:
    """Return a small valid file with changes."""
    devices = [{"name": "a", "containerEdits": {"env": ["A=1"]}}]
    return {"cdiVersion": "0.3.0", "kind": "example.com/gpu", "devices": devices, **changes}


def with_edits(version: str = "0.3.0", **edits: object) -> dict[str, object]:
    return cdi_file_with(cdiVersion=version, devices=[{"name": "a", "containerEdits": edits}])


def test_file_with_every_field_is_valid():
    assert cdi_file_error(EVERYTHING) == ""
    assert cdi_ids(EVERYTHING) == {"example.com/gpu.x=0-a:b.c"}


def test_files_of_this_project_are_valid(tmp_path):
    device = CdiDevice(
        "gpu-0",
        env={"GPU": "0"},
        mounts=(CdiMount("/a", "/b", options=("ro",), type="bind"),),
        nodes=(CdiNode("/dev/nvidia0", host_path="/dev/nvidia1"),),
        annotations={"a": "b"},
    )
    ids = write_cdi_spec(tmp_path, "example.com/gpu", "uid-1", [device])
    (file,) = tmp_path.iterdir()
    document = json.loads(file.read_text())
    assert (cdi_file_error(document), cdi_ids(document)) == ("", set(ids))


GPU = {"name": "gpu-0", "containerEdits": {"env": ["A=1"]}}


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ([], "is a list, not an object"),
        ({}, "cdiVersion: is missing"),
        (cdi_file_with(kind=""), "kind: is missing"),
        (cdi_file_with(devices=None), "devices: is missing"),
        (cdi_file_with(cdiVersion="0.9.0"), "cdiVersion: '0.9.0' is not a CDI version: 0.3.0, "),
        (cdi_file_with(cdiVersion=1), "cdiVersion: is a number, not text"),
        (cdi_file_with(kind="gpu"), "kind: 'gpu' is not <vendor>/<class>"),
        (cdi_file_with(vendor="x"), "vendor: is not a field of CDI"),
        (cdi_file_with(annotations={"a": 1}), "annotations.a: is a number, not text"),
        (cdi_file_with(devices={}), "devices: is an object, not a list"),
        (cdi_file_with(devices=[]), "devices: is empty"),
        (cdi_file_with(devices=[GPU, GPU]), "devices: has 2 devices with the name 'gpu-0'"),
        (cdi_file_with(devices=[{"name": "a"}]), "devices[0].containerEdits: is missing"),
        (
            cdi_file_with(devices=[{"name": "-", "containerEdits": {}}]),
            "devices[0].name: '-' is not a device name",
        ),
        (with_edits(), "devices[0].containerEdits: is empty"),
        (with_edits(env=["A"]), "devices[0].containerEdits.env[0]: 'A' is not <variable>=<value>"),
        (with_edits(deviceNodes=[{}]), "deviceNodes[0].path: is missing"),
        (with_edits(deviceNodes=[{"path": "/a", "type": "x"}]), "type: 'x' is not a type of device file"),
        (with_edits(deviceNodes=[{"path": "/a", "major": -1}]), "major: -1 is not a whole number"),
        (with_edits(deviceNodes=[{"path": "/a", "permissions": "x"}]), "'x' is not a combination of r, w"),
        (with_edits(mounts=[{"hostPath": "/a"}]), "mounts[0].containerPath: is missing"),
        (with_edits(mounts=[{"hostPath": "/a", "containerPath": "/b", "options": "ro"}]), "not a list"),
        (with_edits(hooks=[{"hookName": "start", "path": "/a"}]), "'start' is not a hook of OCI"),
        (with_edits(additionalGids=[True]), "additionalGids[0]: True is not a whole number"),
        (with_edits(intelRdt={"enableMonitoring": 1}), "enableMonitoring: is a number, not true or false"),
        (cdi_file_with(kind="example.com/gpu.x"), "cdiVersion: 0.3.0, but a dot in the class needs 0.6.0"),
        (cdi_file_with(annotations={"a": "b"}), "but annotations needs 0.6.0"),
        (
            cdi_file_with(devices=[{"name": "0", "containerEdits": {"env": ["A=1"]}}]),
            "but a device name that begins with a digit needs 0.5.0",
        ),
        (with_edits(deviceNodes=[{"path": "/a", "hostPath": "/b"}]), "hostPath of a device file needs 0.5.0"),
        (
            with_edits(mounts=[{"hostPath": "/a", "containerPath": "/b", "type": "bind"}]),
            "type of a mount needs 0.4.0",
        ),
        (with_edits("0.6.0", additionalGids=[1]), "needs 0.7.0"),
        (with_edits("1.0.0", intelRdt={"schemata": ["a"]}), "needs 1.1.0"),
        (with_edits("1.0.0", netDevices=[{"hostInterfaceName": "a", "name": "b"}]), "needs 1.1.0"),
    ],
)
def test_invalid_cdi_file_is_refused_with_the_field(document, error):
    assert error in cdi_file_error(document)


@pytest.mark.parametrize("text", ["a.com/b=c", "a.com/b.c=0:1-2_3.4"])
def test_cdi_id_of_vendor_class_and_name_is_valid(text):
    assert cdi_id_error(text) == ""


@pytest.mark.parametrize(
    "text", ["", "a", "a=b", "a/b", "a/b=", "/b=c", "a/=c", "a/b=c d", "a/b=-c", "1/b=c"]
)
def test_invalid_cdi_id_is_refused(text):
    assert cdi_id_error(text)


# --- answers -----------------------------------------------------------------------------------------------

PACKAGE = "k8s.io.kubelet.pkg.apis.dra.v1"
TEXTS = st.text(st.characters(codec="utf-8"), max_size=4)
RETURNED = st.builds(
    ReturnedDevice,
    st.lists(TEXTS, max_size=2).map(tuple),
    TEXTS,
    TEXTS,
    st.lists(TEXTS, max_size=2).map(tuple),
    TEXTS,
)
REPLIES = st.lists(
    st.builds(ClaimReply, TEXTS, st.lists(RETURNED, max_size=2).map(tuple), TEXTS), unique_by=lambda r: r.uid
)


@given(REPLIES)
def test_prepare_answer_of_google_protobuf_is_decoded(replies):
    message = message_class(PACKAGE, "NodePrepareResourcesResponse")()
    for reply in replies:
        entry = message.claims[reply.uid]
        entry.error = reply.error
        for device in reply.devices:
            entry.devices.add(
                request_names=device.requests,
                pool_name=device.pool,
                device_name=device.name,
                cdi_device_ids=device.cdi_ids,
                share_id=device.share_id,
            )
    found = decode_answers(message.SerializeToString(), is_prepare=True)
    assert sorted(found) == sorted(replies)


@given(st.dictionaries(TEXTS, TEXTS))
def test_unprepare_answer_of_google_protobuf_is_decoded(errors):
    message = message_class(PACKAGE, "NodeUnprepareResourcesResponse")()
    for uid, error in errors.items():
        message.claims[uid].error = error
    found = decode_answers(message.SerializeToString(), is_prepare=False)
    assert {reply.uid: reply.error for reply in found} == errors


@given(st.binary(max_size=40))
def test_answer_of_any_bytes_raises_no_other_error_than_valueerror(data):
    for is_prepare in (True, False):
        with suppress(ValueError):
            decode_answers(data, is_prepare=is_prepare)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\x0a\x02\x12", "answer: field 1 ends 1 bytes after the message of 3"),
        (b"\x08\x01", "answer: field 1 has wire type 0, must be 2"),
        (b"\x0a\x03\x0a\x01\xff", "claim 0: uid: the text is not UTF-8"),
        (b"\x0a\x06\x12\x04\x0a\x02\x1a\x01", "claim 0: device 0: field 3 ends"),
        (b"\x0a\x05\x12\x03\x12\x01\xff", "claim 0: error: the text is not UTF-8"),
    ],
)
def test_invalid_answer_is_refused_with_the_place(data, error):
    with pytest.raises(ValueError, match=error):
        decode_answers(data, is_prepare=True)
