"""tools/c_call_cycles.py: the C core's files call each other in one direction only."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[1] / "tools" / "c_call_cycles.py"
CHECKER = runpy.run_path(str(CHECK))

TOP = """
#include "low.h"
static int helper(int a)
{
    return dh_low(a) + 1;
}

int dh_top(int a)
{
    return helper(a);
}
"""
LOW = """
int dh_low(int a)
{
    return a; /* dh_top(a) is only named in this comment */
}
"""


def cycle_of(**sources: str) -> list[str]:
    files = {name.replace("_", "."): text for name, text in sources.items()}
    return [call.caller.file for call in CHECKER["call_cycle"](files)]


def test_calls_in_one_direction_are_no_cycle() -> None:
    assert cycle_of(top_c=TOP, low_c=LOW) == []


def test_two_files_that_call_each_other_are_a_cycle() -> None:
    low = LOW.replace("return a;", "return dh_top(a);")
    assert cycle_of(top_c=TOP, low_c=low) == ["low.c", "top.c"]


def test_cycle_through_three_files_names_all_files() -> None:
    low = LOW.replace("return a;", "return dh_mid(a);")
    mid = "int dh_mid(int a)\n{\n    return dh_top(a);\n}\n"
    assert cycle_of(top_c=TOP, low_c=low, mid_c=mid) == ["low.c", "mid.c", "top.c"]


@pytest.mark.parametrize(
    "header",
    [
        "static inline int dh_inline(int a)\n{\n    return dh_top(a);\n}\n",
        "#define dh_inline(a) \\\n    dh_top(a)\n",
    ],
    ids=["inline function", "macro"],
)
def test_call_in_a_header_counts_for_the_including_file(header: str) -> None:
    low = LOW.replace("return a;", "return dh_inline(a);")
    assert cycle_of(top_c=TOP, low_c=low, low_h=header) == ["low.c", "top.c"]
    assert cycle_of(top_c=TOP, low_c=LOW, low_h=header) == []


def test_static_functions_of_one_name_are_distinct() -> None:
    low = LOW.replace("return a;", "return helper(a);") + "\nstatic int helper(int a)\n{\n    return a;\n}\n"
    assert cycle_of(top_c=TOP, low_c=low) == []


def test_function_passed_as_a_pointer_is_no_call() -> None:
    low = LOW.replace("return a;", "return register_callback(dh_top, a);")
    assert cycle_of(top_c=TOP, low_c=low) == []


def test_planted_cycle_in_the_core_is_found(tmp_path: Path) -> None:
    sources = CHECKER["read_sources"](CHECKER["ROOT"])
    sources["core/seqlock.c"] += "\nvoid dh_planted(void)\n{\n    dh_sampler_pass(0);\n}\n"
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, CHECK, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1
    assert "core/seqlock.c: dh_planted() calls dh_sampler_pass() of core/sampler.c" in done.stdout
    assert done.stdout.count("\n") == 1


def test_core_has_no_call_cycle() -> None:
    done = subprocess.run([sys.executable, CHECK], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    pairs = {
        (call.caller.file, call.callee.file)
        for call in CHECKER["calls_between"](CHECKER["read_sources"](CHECKER["ROOT"]))
    }
    assert ("core/sampler.c", "core/records.c") in pairs, "the check must see the calls that there are"
