"""Single fields of an object from JSON or YAML, checked: a ValueError names the place of what is wrong."""

from datetime import datetime

from agent.allocatable.pod import CPU, HUGEPAGES, MEMORY, Resources
from agent.allocatable.quantity import parse_quantity
from agent.model.objects import Object, mapping, refuse, short


def word(parent: Object, key: str, place: str, default: str | None = None) -> str:
    """One word. Without a default it must be there."""
    value = parent.get(key)
    if default is not None and (value is None or value == ""):
        return default
    if not isinstance(value, str) or not value or not value.isprintable() or " " in value:
        refuse(f"{place}.{key}", f"{short(value)} is no name")
    return value


def words(parent: Object, key: str, place: str) -> tuple[str, ...]:
    """A list of words; an empty one if there is none."""
    value = parent.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        refuse(f"{place}.{key}", "is no list of names")
    return tuple(value)


def moment(parent: Object, key: str, place: str) -> float | None:
    """A time in seconds since 1970; None: not said."""
    text = parent.get(key)
    if text is None:
        return None
    try:
        when = datetime.fromisoformat(str(text))
    except ValueError:
        refuse(f"{place}.{key}", f"{short(text)} is no time")
    if when.tzinfo is None:
        refuse(f"{place}.{key}", f"{short(text)} names no time zone")
    return when.timestamp()


def resources(parent: Object, key: str, place: str) -> Resources:
    """The amounts under a key, those of resources that cgroups know."""
    return quantities(mapping(parent, key, place), f"{place}.{key}")


def quantities(amounts: Object, place: str) -> Resources:
    """Likewise of the amounts themselves. YAML has bare numbers where JSON has text."""
    parsed = {}
    for name, amount in amounts.items():
        if name not in {CPU, MEMORY} and not name.startswith(HUGEPAGES):
            continue
        if isinstance(amount, bool) or not isinstance(amount, str | int | float):
            refuse(f"{place}.{name}", "is no quantity")
        try:
            quantity = parse_quantity(str(amount))
        except ValueError as error:
            refuse(f"{place}.{name}", str(error))
        if quantity.nanos < 0:
            refuse(f"{place}.{name}", f"{short(amount)} is less than nothing")
        parsed[name] = quantity
    return parsed
