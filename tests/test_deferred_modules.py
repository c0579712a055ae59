"""Modules whose code runs at the first access to one of their names."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agent.system import deferred_modules

PROGRAM = """
import importlib, sys, threading
from types import ModuleType
from agent.system import deferred_modules
from agent.system.deferred_modules import DeferredModule
sys.path.insert(0, sys.argv[1])
deferred_modules.DEFERRED = deferred_modules.DEFERRED | {"part"}
deferred_modules.defer_modules()
"""


def run(directory: Path, code: str, part: str = "") -> list[str]:
    """Run a program that defers the modules of DEFERRED and ``part``; return the printed lines."""
    (directory / "part.py").write_text(part)
    command = [sys.executable, "-S", "-c", PROGRAM + textwrap.dedent(code), str(directory)]
    environ = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    return subprocess.check_output(command, text=True, env=environ).splitlines()


def test_module_runs_once_at_the_first_access_to_a_name(tmp_path):
    code = """
    import part
    import part as again
    from types import ModuleType
    print("imported", again is part, type(part) is DeferredModule, part.__name__)
    print(part.VALUE, part.VALUE, type(part) is ModuleType, part.__loader__ is part.__spec__.loader)
    print(type(part.__loader__).__name__, hasattr(part, "missing"))
    """
    assert run(tmp_path, code, "print('runs')\nVALUE = 5") == [
        "imported True True part", "runs", "5 5 True True", "SourceFileLoader False"
    ]  # fmt: skip


def test_import_of_a_name_runs_the_module(tmp_path):
    assert run(tmp_path, "from part import VALUE\nprint(VALUE)", "VALUE = 5") == ["5"]


def test_module_that_reads_its_own_missing_name_gets_an_attribute_error(tmp_path):
    part = "import sys\nFOUND = hasattr(sys.modules[__name__], 'LATER')\nLATER = 1"
    assert run(tmp_path, "import part\nprint(part.FOUND, part.LATER)", part) == ["False 1"]


def test_module_that_raised_runs_again_at_the_next_access(tmp_path):
    code = """
    import part
    for _ in range(2):
        try:
            print(part.VALUE)
        except OSError as error:
            print(error)
    """
    fails = "import sys\nif not hasattr(sys, 'tried'):\n    sys.tried = True\n    raise OSError('not yet')\n"
    assert run(tmp_path, code, f"{fails}VALUE = 5") == ["not yet", "5"]


def test_second_thread_waits_until_the_module_has_run(tmp_path):
    code = """
    import part
    begun, go = sys.begun, sys.go = threading.Event(), threading.Event()
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(part.VALUE)) for _ in range(8)]
    threads[0].start()
    begun.wait()
    for thread in threads[1:]:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    print(seen)
    """
    part = "import sys\nsys.begun.set()\nsys.go.wait()\nVALUE = 5"
    assert run(tmp_path, code, part) == [str([5] * 8)]


def test_second_thread_gets_no_name_before_the_module_has_run(tmp_path):
    code = """
    import part
    begun, go = sys.begun, sys.go = threading.Event(), threading.Event()
    seen = []
    first = threading.Thread(target=lambda: part.LATER)
    second = threading.Thread(target=lambda: seen.append(tuple(part.VALUES)))
    first.start()
    begun.wait()
    second.start()
    second.join(0.2)  # gets (1,) if it does not wait
    go.set()
    first.join()
    second.join()
    print(seen)
    """
    part = "import sys\nVALUES = [1]\nsys.begun.set()\nsys.go.wait()\nLATER = VALUES.append(2)"
    assert run(tmp_path, code, part) == ["[(1, 2)]"]


@pytest.mark.parametrize("name", sorted(deferred_modules.DEFERRED))
def test_deferred_module_has_all_its_names(tmp_path, name):
    public = "print(*sorted(n for n in vars(module) if not n.startswith('__')))"
    code = f"module = importlib.import_module({name!r})\nprint(type(module) is DeferredModule)"
    lines = run(tmp_path, f"{code}\nmodule.x = 1\ngetattr(module, 'y', None)\ndel module.x\n{public}")
    command = [
        sys.executable,
        "-S",
        "-c",
        f"import importlib\nmodule = importlib.import_module({name!r})\n{public}",
    ]
    environ = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    assert lines == ["True", subprocess.check_output(command, text=True, env=environ).strip()]
