"""The class on the wire, as Google's protobuf reads it."""

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from agent.model.prepare import ErrorClass
from agent.serve.dra_plugin.prepared_devices import ERROR_CLASS_NUMBERS, WireMode, encode_error_class

PERMANENT = {ErrorClass.BAD_CONFIG, ErrorClass.FAILED_DEVICE, ErrorClass.PERMANENT}


def response_class(kind: "descriptor_pb2.FieldDescriptorProto.Type.ValueType", name: str):
    """Return the message class NodePrepareResourceResponse of KEP-5322: with its error and field 3."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package=name, syntax="proto3")
    message = file.message_type.add(name="Response")
    message.field.add(name="error", number=2, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    added = message.field.add(name=name, number=3, type=kind, label=field.LABEL_OPTIONAL)
    if kind == field.TYPE_ENUM:
        enum = file.enum_type.add(name="ErrorType")
        enum.value.add(name="UNKNOWN", number=0)
        enum.value.add(name="PERMANENT", number=1)
        added.type_name = f".{name}.ErrorType"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{name}.Response"))


ENUM = response_class(descriptor_pb2.FieldDescriptorProto.TYPE_ENUM, "error_type")
FLAG = response_class(descriptor_pb2.FieldDescriptorProto.TYPE_BOOL, "permanent_error")


@pytest.mark.parametrize("error_class", ErrorClass)
def test_default_mode_sends_no_error_type(error_class: ErrorClass) -> None:
    assert encode_error_class(error_class, WireMode.NONE) == b""


@pytest.mark.parametrize("error_class", ErrorClass)
def test_error_type_enum_is_decoded_by_a_new_peer(error_class: ErrorClass) -> None:
    sent = ENUM(error="words").SerializeToString() + encode_error_class(error_class, WireMode.ERROR_TYPE)
    assert ENUM.FromString(sent).error_type == (error_class in PERMANENT)
    assert ENUM.FromString(sent).error == "words"


@pytest.mark.parametrize("error_class", ErrorClass)
def test_permanent_flag_is_decoded_by_a_new_peer(error_class: ErrorClass) -> None:
    sent = encode_error_class(error_class, WireMode.PERMANENT_ERROR) + FLAG(error="words").SerializeToString()
    assert FLAG.FromString(sent).permanent_error is (error_class in PERMANENT)
    assert FLAG.FromString(sent).error == "words"


def test_table_has_every_class_and_mode() -> None:
    assert set(ERROR_CLASS_NUMBERS) == set(WireMode)
    assert all(set(numbers) == set(ErrorClass) for numbers in ERROR_CLASS_NUMBERS.values())
    assert all(0 <= number < 128 for numbers in ERROR_CLASS_NUMBERS.values() for number in numbers.values())
