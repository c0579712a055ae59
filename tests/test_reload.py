"""Reload of the configuration: applied as a whole or not at all; systemd, log and status get the result."""

import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from agent.app.reload import READ_S, VALUE_CHARS, ConfigReloader, check_reloadable, config_changes
from agent.config.config import SETTINGS, Config, LoadedConfig, load_with_origins
from agent.errors import ConfigError
from agent.model.report import ConfigReload
from agent.model.settings import CustomCheck, RuleOverride
from agent.model.socket_address import ListenAddress
from agent.serve.sd_notify import SystemdNotifier

NOW_S = 1_700_000_000.0
FIXED = """
[throttle]
events = 5
[roots]
sysfs = "/elsewhere"
[agent]
period = "2s"
[gpu]
slow-period = "10s"
"""


class RecordingNotifier(SystemdNotifier):
    """Notifier that records the messages that a manager would get."""

    def __init__(self) -> None:
        super().__init__(None)
        self.messages: list[str] = []
        self._sent = trio.Event()

    def _send(self, *messages: bytes) -> None:
        for message in filter(None, (self._unsent, *messages)):
            self.messages.append(message.decode().partition("\n")[0])
        self._unsent = b""
        self._sent.set()

    async def wait_messages(self, count: int) -> None:
        """Wait until `count` messages were sent."""
        while len(self.messages) < count:
            self._sent = trio.Event()
            await self._sent.wait()


class Setup:
    """Reloader of a file in a temporary directory."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "config.toml"
        self.file.write_text("")
        self.notifier = RecordingNotifier()
        self.applied: list[Config] = []
        self.load: Callable[[], LoadedConfig] = self.read
        self.reloader = ConfigReloader(
            self.read().config, lambda: self.load(), self.applied.append, self.notifier, lambda: NOW_S
        )

    def read(self) -> LoadedConfig:
        return load_with_origins({}, {}, file=self.file, needs_runtime_dir=False)

    async def reload(self, text: str) -> ConfigReload:
        """Reload with another text of the file; return the result."""
        self.file.write_text(text)
        return await self.reload_file()

    async def reload_file(self) -> ConfigReload:
        """Reload the file as it is; return the result."""
        ready = len(self.notifier.messages) + 2
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.reloader.run)
            self.reloader.request()
            await self.notifier.wait_messages(ready)
            nursery.cancel_scope.cancel()
        assert self.reloader.last is not None
        return self.reloader.last


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


async def test_changed_settings_are_applied_and_named(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    result = await setup.reload('[throttle]\nevents = 5\n[gpu.xids]\n31 = "ignore"')
    changes = ("throttle.events: 10 to 5", 'gpu.xids: {} to {"31": "ignore"}')
    assert result == ConfigReload(NOW_S, changes=changes)
    assert [config.throttle_events for config in setup.applied] == [5]
    assert f"configuration: reloaded: {changes[0]}; {changes[1]}" in caplog.text
    assert setup.notifier.messages == ["RELOADING=1", "READY=1"]


async def test_unchanged_file_applies_nothing(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert await setup.reload("# only a comment") == ConfigReload(NOW_S)
    assert setup.applied == []
    assert "configuration: reloaded: no setting has changed" in caplog.text


async def test_second_reload_names_changes_since_the_first(setup: Setup) -> None:
    await setup.reload("[throttle]\nevents = 5")
    assert (await setup.reload("[throttle]\nevents = 6")).changes == ("throttle.events: 5 to 6",)
    assert (await setup.reload("")).changes == ("throttle.events: 6 to 10",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[throttle]\nevents = 0", "FILE: throttle.events: 0 is below the limit of 1"),
        ("[throttle", "FILE:1: not valid TOML: expected ']' at the end of a table declaration"),
        (
            FIXED,
            'FILE: agent.period: "1s" to "2s"; FILE: roots.sysfs: "/sys" to "/elsewhere": only a restart of '
            "the agent applies this change; restart it",
        ),
    ],
    ids=["limit", "syntax", "fixed"],
)
async def test_refused_configuration_changes_nothing(
    setup: Setup, caplog: pytest.LogCaptureFixture, text: str, words: str
) -> None:
    result = await setup.reload(text)
    assert result == ConfigReload(NOW_S, words.replace("FILE", str(setup.file)))
    assert setup.applied == []
    assert "the configuration in effect stays" in caplog.text
    assert setup.notifier.messages == ["RELOADING=1", "READY=1"], "systemd does not wait for ever"


async def test_removed_file_is_refused(setup: Setup) -> None:
    setup.file.unlink()
    assert "No such file" in (await setup.reload_file()).error


async def test_hung_disk_ends_the_reload_with_an_error(setup: Setup, autojump_clock: MockClock) -> None:
    release = threading.Event()

    def hang() -> LoadedConfig:
        release.wait()
        raise ConfigError("late")

    setup.load = hang
    autojump_clock.autojump_threshold = float("inf")  # a thread is no reason to jump
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(setup.reloader.run)
            setup.reloader.request()
            await wait_all_tasks_blocked()
            autojump_clock.jump(READ_S)
            await setup.notifier.wait_messages(2)
            assert setup.reloader.last is not None
            assert (
                setup.reloader.last.error
                == "the configuration files were not read within 10 s; check the disk"
            )

            setup.reloader.request()  # no second thread hangs
            await setup.notifier.wait_messages(4)
            assert setup.reloader.last.error == (
                "the previous reload is still reading the configuration files; check the disk"
            )
            nursery.cancel_scope.cancel()
    finally:
        release.set()
    assert setup.applied == []


async def test_reload_whose_thread_begins_late_is_not_repeated(
    setup: Setup, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def call_in_thread(function: object, name: str) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr("agent.app.reload.call_in_thread", call_in_thread)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(setup.reloader.run)
        for messages, error in ((2, "not read within 10 s"), (4, "the previous reload is still reading")):
            setup.reloader.request()
            await setup.notifier.wait_messages(messages)
            assert setup.reloader.last is not None
            assert error in setup.reloader.last.error
        nursery.cancel_scope.cancel()


def test_request_during_a_reload_leads_to_one_more(setup: Setup) -> None:
    async def main() -> None:
        loads = 0
        token = trio.lowlevel.current_trio_token()

        def load() -> LoadedConfig:
            nonlocal loads
            loads += 1
            if loads == 1:  # both arrive while the files are read
                for _ in range(2):
                    trio.from_thread.run_sync(setup.reloader.request, trio_token=token)
            return setup.read()

        setup.load = load
        async with trio.open_nursery() as nursery:
            nursery.start_soon(setup.reloader.run)
            setup.reloader.request()
            await setup.notifier.wait_messages(4)
            nursery.cancel_scope.cancel()
        assert loads == 2

    trio.run(main)


FIXED_VALUES = {
    "agent.drivers": ("a.example.com",),
    "agent.node-name": "other",
    "agent.period": 2 * 10**9,
    "agent.log-format": "json",
    "http.listen": (ListenAddress("127.0.0.1", 14680),),
    "roots.kubelet-cgroup": "/other",
    "roots.nvml-library": "other.so",
    "roots.kmsg-any-facility": True,
    "cgroups.sweep": 10**9,
    "cgroups.resync": 10**9,
    "cgroups.max-groups": 1,
    "cgroups.held-memory": 0,
    "gpu.watch": False,
    "gpu.process": False,
    "gpu.slow-period": 20 * 10**9,
    "gpu.cpu-budget": 0,
    "gpu.deadline": 10**9,
    "k8s.namespace": "other",
    "nvsentinel.remediate": True,
    "history.rows": 1,
    "history.age": 7200,
}
"""Other values of the settings that only a restart changes; those that are missing are paths."""


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.is_fixed], ids=lambda s: s.key)
def test_setting_of_sockets_roots_and_threads_is_refused_by_name(setting: object) -> None:
    before = Config(node_name="n", nvsentinel_socket=Path("/run/nvsentinel.sock"))  # for its other setting
    key, field = setting.key, setting.field  # type: ignore[attr-defined]
    fields = {name: getattr(before, name) for name in before.__struct_fields__}
    after = Config(**{**fields, field: FIXED_VALUES.get(key, Path("/other"))})
    with pytest.raises(ConfigError, match=rf"^{key}: .* to .*: only a restart of the agent"):
        check_reloadable(before, LoadedConfig(after, {}, ()))


def test_configuration_page_lists_each_setting_that_needs_a_restart() -> None:
    page = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()
    (text,) = re.findall(r"refused with its name:(.*?)\. `drahealth config", page, re.DOTALL)
    listed = set(re.findall(r"`([a-z0-9.-]+)`", text))
    for table in re.findall(r"`\[([a-z0-9]+)\]`", text):
        listed |= {setting.key for setting in SETTINGS if setting.key.startswith(f"{table}.")}
    assert sorted(listed) == sorted(setting.key for setting in SETTINGS if setting.is_fixed)


def test_changes_show_values_as_in_a_file() -> None:
    before = Config(node_name="n")
    after = Config(node_name="n", expect_cpus=0b1111, taint_wait_s=0.5, expect_gpus=8)
    assert list(map(str, config_changes(before, after))) == [
        'expect.cpus: unset to "0-3"',
        "expect.gpus: unset to 8",
        'taints.wait: "2s" to "500ms"',
    ]
    assert config_changes(before, before) == ()


def test_change_of_a_check_shows_no_argument_of_its_command() -> None:
    checks = (CustomCheck("fabric", ("/usr/bin/check", "--password", "pass1"), "gpu-*"),)
    (change,) = config_changes(Config(node_name="n"), Config(node_name="n", checks=checks))
    assert '"command": ["/usr/bin/check"]' in str(change)
    assert "pass1" not in str(change)


def test_long_value_is_cut_in_the_text_of_a_change() -> None:
    rules = tuple(RuleOverride("cpu.smt", f"device-{number}", off=True) for number in range(64))
    (change,) = config_changes(Config(node_name="n"), Config(node_name="n", rules=rules))
    assert len(str(change)) <= len("rules: [] to ") + VALUE_CHARS
    assert str(change).endswith("...")
