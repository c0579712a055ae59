"""Heap of the C library in this process."""

from agent.native._core import lib


def use_one_heap_arena() -> None:
    """Let all threads share one arena of the heap; for a process of drahealth, before it starts threads.

    Free memory of a thread's own arena stays with the process.
    """
    lib.dh_heap_one_arena()


def trim_heap() -> None:
    """Give free pages of the heap back to the kernel. Thread-safe. Blocks for milliseconds."""
    lib.dh_heap_trim()
