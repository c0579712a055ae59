"""The language in which lines of the kernel log are asked for, and its twin in regular expressions.

Tables of patterns stand elsewhere: agent.health.gpu.xid.patterns, agent.health.kernel_log.patterns. The
reader's own interpreter is in C; a test holds the two to the same answers.

A pattern is literal text and directives, matched from the start of a message; the first that matches counts:

    %b  a PCI bus id        %d  a decimal number    %x  a hexadecimal number with its 0x
    %w  a word              %k  the rest of the line
    %*  anything up to the next literal, or to the end

Lines whose directives all match the same text, but for %*, are one kind, and are counted together. So what
varies within a flood (a process, a channel, an address) stands under %*, and what decides does not.
"""

import re
from typing import Final

_DIRECTIVES: Final = {
    "%b": r"([0-9a-fA-F]{4,8}+:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?+)",
    "%d": r"([0-9]++)",
    "%x": r"(0x[0-9a-fA-F]++)",
    "%w": r"([^ \t,()]++)",
    "%k": r"(.*+)",
}


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A pattern as a regular expression that takes just what the reader's interpreter takes.

    Each directive is a group, ``%*`` too. None ever gives back what it took: the interpreter does not.
    """
    tokens = re.split(r"(%[bdxwk*])", pattern)
    parts = []
    for index, token in enumerate(tokens):
        if index % 2 == 0:
            parts.append(re.escape(token))
        elif token != "%*":
            parts.append(_DIRECTIVES[token])
        elif literal := tokens[index + 1]:
            parts.append(f"((?>(?:(?!{re.escape(literal)}).)*))")  # not *+: wrong in 3.11.2
        else:
            parts.append("(.*+)")
    return re.compile("".join(parts), re.DOTALL)
