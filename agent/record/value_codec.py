"""Encoding of the model's values as plain data for msgpack, complete or as a difference. Pure.

A complete value that is not a scalar is a list whose first item is a tag: of a tuple, a mapping, a set, a
large integer, or of one of the known classes. A difference is relative to an earlier value: a map
from position to change, which is the number to add for an integer. A difference of equal values is NO_CHANGE.

The tags and the fields of all classes are in the head of each file (:meth:`ValueEncoder.description`), so
that a later release reads a file although fields were added, removed or moved since.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum, StrEnum
from operator import attrgetter
from types import UnionType
from typing import Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints

TUPLE_TAG: Final = 0
MAPPING_TAG: Final = 1
SET_TAG: Final = 2
LARGE_INT_TAG: Final = 3
BYTES_TEXT_TAG: Final = 4
"""Tag of a text that is not valid Unicode and is therefore stored as bytes."""
LIST_TAG: Final = 5
FIRST_CLASS_TAG: Final = 16
RESIZED: Final = -1
"""Key that marks a tuple of another length in a difference.

Its value has the number of kept items at both ends, and the items between them.
"""

INT64_MIN: Final = -(1 << 63)
UINT64_MAX: Final = (1 << 64) - 1


class NoChange:
    """Type of the constant :data:`NO_CHANGE`, which is the difference of two equal values."""


NO_CHANGE: Final = NoChange()
"""Result of a comparison of two equal values."""


class CodecError(Exception):
    """Error: recorded data cannot be decoded; the text has the reason."""


class ValueClass(NamedTuple):
    """Named tuple or dataclass whose values are recorded field by field, or an enum."""

    type: type
    names: tuple[str, ...]
    """Names of the fields; of an enum: empty."""

    @property
    def is_enum(self) -> bool:
        """True: the class is an enum, whose values are its members."""
        return issubclass(self.type, Enum)

    def make(self, values: list[Any]) -> Any:
        """Create a value of the class from the values of its fields, in the order of ``names``."""
        if issubclass(self.type, tuple):
            return self.type._make(values)  # type: ignore[attr-defined]  # a NamedTuple
        return self.type(*values)


def classes_of(*roots: type) -> list[ValueClass]:
    """Return all classes that occur in the type hints of `roots`, sorted by name.

    Raises:
        TypeError: Two classes have the same name, or a class is no enum, named tuple or dataclass.
    """
    found: dict[str, type] = {}

    def visit(hint: Any) -> None:
        if get_origin(hint) in (Union, UnionType, None) and not get_args(hint):
            if isinstance(hint, type) and hint not in (int, str, float, bool, bytes, type(None), object):
                add(hint)
            return
        for inner in get_args(hint):
            if inner is not Ellipsis:
                visit(inner)

    def add(kind: type) -> None:
        if (known := found.setdefault(kind.__name__, kind)) is not kind:
            raise TypeError(
                f"record codec: two classes are named {kind.__name__}: in {known.__module__} and "
                f"{kind.__module__}; rename one of them"
            )
        if visited.get(kind):
            return
        visited[kind] = True
        if not issubclass(kind, Enum):
            for hint in get_type_hints(kind).values():
                visit(hint)

    visited: dict[type, bool] = {}
    for root in roots:
        add(root)
    return [ValueClass(found[name], _field_names(found[name])) for name in sorted(found)]


def _field_names(kind: type) -> tuple[str, ...]:
    if issubclass(kind, Enum):
        return ()
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return tuple(kind._fields)
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    raise TypeError(
        f"record codec: class {kind.__name__} is neither an enum, a named tuple nor a dataclass; it cannot "
        "be recorded"
    )


class ValueEncoder:
    """Encoder of values and differences as plain data, with a numeric tag for each known class."""

    def __init__(self, classes: Iterable[ValueClass]) -> None:
        self._classes = list(classes)
        self._tags = {known.type: FIRST_CLASS_TAG + at for at, known in enumerate(self._classes)}
        self._getters = {class_.type: _getter(class_) for class_ in self._classes if not class_.is_enum}

    def description(self) -> list[list[Any]]:
        """Return names and fields of the classes, in the order of their tags, for the head of a file."""
        return [[class_.type.__name__, *class_.names] for class_ in self._classes]

    def complete(self, value: Any) -> Any:
        """Return a value of the model as plain data for msgpack.

        Raises:
            TypeError: The value, or a part of it, has an unknown type.
        """
        kind = type(value)
        if kind is int:
            if INT64_MIN <= value <= UINT64_MAX:
                return value
            return [LARGE_INT_TAG, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]
        if kind is str:
            return value if value.isascii() else _text(value)
        if value is None or kind is float or kind is bool or kind is bytes:
            return value
        complete = self.complete
        if getter := self._getters.get(kind):
            return [self._tags[kind], *map(complete, getter(value))]
        if kind is tuple:
            return [TUPLE_TAG, *map(complete, value)]
        if (tag := self._tags.get(kind)) is not None:
            return [tag, value.value]
        if isinstance(value, Mapping):
            return [MAPPING_TAG, *(complete(part) for item in value.items() for part in item)]
        if isinstance(value, AbstractSet):
            return [SET_TAG, *map(complete, sorted(value, key=repr))]
        if kind is list:
            return [LIST_TAG, *map(complete, value)]
        if isinstance(value, StrEnum):  # in a field of type str, where its text alone counts
            return str(value)
        raise TypeError(
            f"record codec: a value of type {kind.__name__} cannot be recorded; use a type of the model's "
            "classes"
        )

    def difference(self, old: Any, new: Any) -> Any:
        """Return the difference between two values as plain data; NO_CHANGE if they are equal."""
        if old is new:
            return NO_CHANGE
        kind = type(new)
        if type(old) is not kind:
            return self.complete(new)
        if kind is int:
            return NO_CHANGE if old == new else self.complete(new - old)
        if getter := self._getters.get(kind):
            difference = self.difference
            changes = {}
            for at, (before, after) in enumerate(zip(getter(old), getter(new), strict=True)):
                if before is not after and (change := difference(before, after)) is not NO_CHANGE:
                    changes[at] = change
            return changes or NO_CHANGE
        if kind is tuple:
            return self._tuple_difference(old, new)
        if kind is float:
            return NO_CHANGE if old == new and repr(old) == repr(new) else new
        if isinstance(new, Mapping) and list(old) == list(new):
            changes = {}
            for at, key in enumerate(new):
                if (change := self.difference(old[key], new[key])) is not NO_CHANGE:
                    changes[at] = change
            return changes or NO_CHANGE
        return NO_CHANGE if old == new and not isinstance(new, Mapping) else self.complete(new)

    def _tuple_difference(self, old: tuple[Any, ...], new: tuple[Any, ...]) -> Any:
        changes: dict[int, Any] = {}
        first = 0
        shorter = min(len(old), len(new))
        if len(old) != len(new):
            while first < shorter and _key(old[first]) == _key(new[first]):
                first += 1
            last = 0
            while last < shorter - first and _key(old[-1 - last]) == _key(new[-1 - last]):
                last += 1
            between = new[first : len(new) - last]
            changes[RESIZED] = [first, last, *map(self.complete, between)]
            pairs = [(at, old[at], new[at]) for at in range(first)]
            # positions in the new tuple, which the decoder resizes before it changes items
            offset = len(new) - last
            pairs += [(offset + at, old[len(old) - last + at], new[offset + at]) for at in range(last)]
        else:
            pairs = [(at, before, new[at]) for at, before in enumerate(old)]
        for at, before, after in pairs:
            if before is not after and (change := self.difference(before, after)) is not NO_CHANGE:
                changes[at] = change
        return changes or NO_CHANGE


def _key(value: Any) -> Any:
    """Return what identifies an item in two versions of a tuple: its first field, or the item itself."""
    if isinstance(value, tuple) and value:
        return value[0]
    return value


def _getter(known: ValueClass) -> Any:
    if issubclass(known.type, tuple):
        return tuple.__iter__
    if not known.names:
        return lambda _: ()
    if len(known.names) == 1:
        (name,) = known.names
        return lambda value: (getattr(value, name),)
    return attrgetter(*known.names)


def _text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        return [BYTES_TEXT_TAG, value.encode("utf-8", "surrogatepass")]
    return value


FORMER_NAMES: Final[Mapping[str, str]] = {
    "CpusAtStart": "CpusBaseline",
    "DeclaredCpuThrottle": "DeclaredDeviceThrottleCounters",
    "DeclaredCpus": "DeclaredCpuDevice",
    "DeclaredGpu": "DeclaredGpuDevice",
    "DeclaredHugepages": "DeclaredHugepageDevice",
    "DeclaredMemory": "DeclaredMemoryDevice",
    "DeclaredNic": "DeclaredNicDevice",
    "DeclaredOther": "DeclaredOtherDevice",
    "DeclaredPci": "DeclaredPciDevice",
    "FrequencyAtStart": "FrequencyBaseline",
    "GpuAtStart": "GpuBaseline",
    "HugepagePoolAtStart": "HugepagePoolBaseline",
    "KernelLogEntryId": "KernelLogLineGroupId",
    "MemoryAtStart": "MemoryBaseline",
    "NicAtStart": "NicBaseline",
    "NicPortAtStart": "NicPortBaseline",
    "PciAtStart": "PciBaseline",
    "PciStartValues": "PciBaselineValues",
    "PodAuditState": "PodsSampleState",
    "StartValues": "BootBaseline",
}
"""Names of recorded classes by the name in older files, whose fields are the same."""


class ValueDecoder:
    """Decoder of the recorded values in one file, with the classes that the file's head describes."""

    def __init__(self, description: Iterable[Iterable[Any]], known: Iterable[ValueClass]) -> None:
        """Create the decoder.

        Args:
            description: Names and fields of the classes in the file, in the order of their tags.
            known: Classes of this release.
        """
        by_name = {known.type.__name__: known for known in known}
        self._readers: list[_ClassReader] = []
        self._changers: dict[type, _ClassReader] = {}
        self.changed_classes: set[str] = set()
        """Names of the classes whose fields differ between the file and this release, or that it lacks."""
        for written, *names in description:
            name = FORMER_NAMES.get(written, written)
            known_class = by_name.get(name)
            if known_class is None or tuple(names) != known_class.names:
                self.changed_classes.add(name)
            reader = _ClassReader(name, tuple(names), known_class)
            self._readers.append(reader)
            if known_class is not None:
                self._changers[known_class.type] = reader

    def field_names(self, kind: type) -> tuple[str, ...]:
        """Return the names of the recorded fields of a class, in the order of the record."""
        reader = self._changers.get(kind)
        return reader.recorded if reader else ()

    def complete(self, data: Any) -> Any:
        """Return the value that :meth:`ValueEncoder.complete` encoded.

        Raises:
            CodecError: The data are not valid, or name a class that this release does not have.
        """
        if type(data) is not list:
            if type(data) is dict:
                raise CodecError("the record is damaged: it has a difference where a complete value must be")
            return data
        if not data or type(data[0]) is not int:
            raise CodecError("the record is damaged: a value has no type tag")
        tag = data[0]
        if tag >= FIRST_CLASS_TAG:
            if tag - FIRST_CLASS_TAG >= len(self._readers):
                raise CodecError(f"the record is damaged: its head does not describe the type tag {tag}")
            return self._readers[tag - FIRST_CLASS_TAG].complete(data, self)
        complete = self.complete
        if tag == TUPLE_TAG:
            return tuple(map(complete, data[1:]))
        if tag == MAPPING_TAG:
            parts = [complete(part) for part in data[1:]]
            return dict(zip(parts[::2], parts[1::2], strict=True))
        if tag == SET_TAG:
            return frozenset(map(complete, data[1:]))
        if tag == LIST_TAG:
            return list(map(complete, data[1:]))
        if tag == LARGE_INT_TAG:
            return int.from_bytes(data[1], "little", signed=True)
        if tag == BYTES_TEXT_TAG:
            return data[1].decode("utf-8", "surrogatepass")
        raise CodecError(
            f"the record has type tag {tag}, which this release does not know; read it with the release that "
            "wrote it"
        )

    def apply(self, old: Any, data: Any) -> Any:
        """Return the value that results from ``old`` and a difference of :meth:`ValueEncoder.difference`.

        Raises:
            CodecError: The data are not valid, or do not fit the value.
        """
        kind = type(old)
        if type(data) is not dict:
            if kind is int:
                if type(data) is int:
                    return old + data
                if type(data) is list and data and data[0] == LARGE_INT_TAG:
                    return old + self.complete(data)
            return self.complete(data)
        if kind is tuple:
            return self._changed_tuple(old, data)
        if reader := self._changers.get(kind):
            return reader.apply(old, data, self)
        if isinstance(old, Mapping):
            keys = list(old)
            new = dict(old)
            for at, change in data.items():
                new[keys[at]] = self.apply(old[keys[at]], change)
            return new
        raise CodecError(
            f"the record is damaged: it has a difference for a value of type {kind.__name__}, which has none"
        )

    def _changed_tuple(self, old: tuple[Any, ...], data: dict[int, Any]) -> tuple[Any, ...]:
        new = list(old)
        if (resized := data.get(RESIZED)) is not None:
            first, last, *between = resized
            new[first : len(old) - last] = map(self.complete, between)
        for at, change in data.items():
            if at != RESIZED:
                new[at] = self.apply(new[at], change)
        return tuple(new)


def add_difference(to: dict[Any, Any], difference: dict[Any, Any]) -> None:
    """Merge a later difference into ``to``, so that ``to`` has the effect of both.

    Only integers may change in the later difference. ``to`` takes over parts of it, so the caller must not
    use it again.
    """
    for at, change in difference.items():
        if at not in to:
            to[at] = change
        elif type(change) is int:
            to[at] += change
        else:
            add_difference(to[at], change)


class _ClassReader:
    """Decoder of values of one recorded class: maps the recorded fields to those of this release."""

    def __init__(self, name: str, recorded: tuple[str, ...], known: ValueClass | None) -> None:
        self.recorded = recorded
        self._name = name
        self._known = known
        self._size = len(recorded) + 1
        self._members: dict[Any, Any] = {}
        self._same = known is not None and known.names == recorded
        if known is not None and not known.is_enum:
            self._getter = _getter(known)
            self._places = [known.names.index(name) if name in known.names else None for name in recorded]
            self._names = known.names

    def complete(self, data: list[Any], decoder: ValueDecoder) -> Any:
        known = self._known
        if known is None:
            raise CodecError(
                f"this release has no class {self._name}; read the record with the release that wrote it"
            )
        if known.is_enum:
            try:
                return known.type(data[1])
            except ValueError:
                raise CodecError(
                    f"this release has no value {data[1]!r} of the enum {self._name}; read the record with "
                    "the release that wrote it"
                ) from None
        if len(data) != self._size:
            raise CodecError(
                f"the record is damaged: a value of class {self._name} has {len(data) - 1} fields, expected "
                f"{self._size - 1}"
            )
        if self._same:
            return known.make([decoder.complete(part) for part in data[1:]])
        given = {
            self._names[place]: decoder.complete(part)
            for place, part in zip(self._places, data[1:], strict=True)
            if place is not None
        }
        try:
            return known.type(**given)
        except TypeError as error:
            raise CodecError(
                f"this release cannot create a recorded value of class {self._name}: {error}; read the "
                "record with the release that wrote it"
            ) from None

    def apply(self, old: Any, data: dict[int, Any], decoder: ValueDecoder) -> Any:
        assert self._known is not None
        values = list(self._getter(old))
        for at, change in data.items():
            place = self._places[at]
            if place is not None:
                values[place] = decoder.apply(values[place], change)
        return self._known.make(values)
