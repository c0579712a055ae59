"""Random messages of a type, made by Google's protobuf: all that the other side may send, of any version."""

from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)

VALUES = {
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.text(max_size=8) | st.sampled_from(["0-3", "2Mi", "uid"]),
    FieldDescriptor.TYPE_INT64: st.integers(-1, 600) | INT64,
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_ENUM: st.integers(0, 9) | st.integers(-(1 << 31), (1 << 31) - 1),
}


@st.composite
def messages(draw: st.DrawFn, kind: Descriptor, entries: int = 3) -> Any:
    """Draw a message with any of its fields set to any value of its type."""
    message = message_factory.GetMessageClass(kind)()
    for field in kind.fields:
        values = messages(field.message_type) if field.message_type else VALUES[field.type]
        if field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(values, max_size=entries)))
        elif draw(st.booleans()):
            if field.message_type:
                getattr(message, field.name).CopyFrom(draw(values))
            else:
                setattr(message, field.name, draw(values))
    return message
