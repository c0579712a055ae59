"""Numbers in words: texts that stay the same while what they tell of does."""


def duration(seconds: float) -> str:
    """In the largest unit that keeps it whole: ``90 s``, ``2 min``, ``1 h``."""
    for factor, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= factor and seconds % factor == 0:
            return f"{seconds / factor:g} {unit}"
    return f"{seconds:g} s"


def at_least(count: int) -> str:
    """A count that may grow as we speak: exact below ten, then by powers of ten."""
    return str(count) if count < 10 else f"at least {10 ** (len(str(count)) - 1)}"
