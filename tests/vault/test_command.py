"""`cumem-sleep vault` and what its status shows, to people and programs."""

from __future__ import annotations

import json
import os
import pathlib
import re

import pytest
from running import RunningVault, Segment
from support import PAGE, run_script

from cumem_sleep import CuMemAllocator, OutOfHostMemory, metrics
from cumem_sleep.errors import counted
from cumem_sleep.tools import cli
from cumem_sleep.tools import vault as command
from cumem_sleep.vault.client import VaultClient

pytestmark = [pytest.mark.sim, pytest.mark.slow]


@pytest.fixture
def asleep(vault: RunningVault, client: VaultClient, allocator: CuMemAllocator) -> RunningVault:
    """With two backups, one of them retained, and a client whose name is trouble."""
    mine = Segment(client, allocator.malloc(PAGE, "weights"), PAGE)
    mine.read(mine.back_up())
    client.mark([mine.back_up()], needed=False)
    with pytest.raises(OutOfHostMemory):
        client.reserve(mine.gpu, [64 * PAGE])
    return vault


def test_status_is_shown_to_people(asleep: RunningVault, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["vault", "status", "--socket", str(asleep.socket)]) == 0
    shown = capsys.readouterr().out
    assert f"simulated: vault of pid {asleep.process.pid} at {asleep.socket}: 64.00 MiB of 64.00 MiB pinned" in (
        shown.replace("\n", "")
    )
    assert re.search(r"^test \(pid \d+\) +2\.00 MiB +2\.00 MiB +0 B +0$", shown, re.MULTILINE)
    assert re.search(r"^free +60\.00 MiB$", shown, re.MULTILINE)
    assert re.search(r"^left +62\.00 MiB$", shown, re.MULTILINE)
    refused = counted(asleep.status()["refused"], "request")  # the tests before this one have their part in it
    assert re.search(rf"^refused +{refused}$", shown, re.MULTILINE)
    assert re.search(r"GPU-63756d65\S+ +2\.00 MiB +2\.00 MiB +.* GB/s", shown)


def test_status_is_json_for_programs(asleep: RunningVault, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["vault", "status", "--json", "--socket", str(asleep.socket)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts)[:5] == ["command", "version", "ok", "simulated", "error"]
    assert (facts["command"], facts["ok"], facts["simulated"]) == ("vault status", True, True)
    assert (facts["asleep_bytes"], facts["awake_bytes"], facts["free_bytes"]) == (PAGE, PAGE, 30 * PAGE)
    assert facts["left_bytes"] == 31 * PAGE
    (gpu,) = facts["gpus"]
    assert (gpu["ordinal"], gpu["asleep_bytes"], gpu["awake_bytes"], gpu["shared_bytes"]) == (0, PAGE, PAGE, 0)
    assert gpu["last_out_bytes"] >= 2 * PAGE
    assert gpu["last_out_gbps"] > 0
    (client,) = facts["clients"]
    assert (client["pid"], client["name"]) == (os.getpid(), "test")
    held = {"asleep_bytes": PAGE, "awake_bytes": PAGE, "shared_bytes": 0, "spilled_bytes": 0}
    assert client["gpus"] == [{"uuid": gpu["uuid"], **held}]
    assert held.items() <= client.items()


def samples(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^([^#\s].*) (\S+)$", text, re.MULTILINE)}


def test_status_is_read_by_prometheus(asleep: RunningVault, capsys: pytest.CaptureFixture[str]) -> None:
    strange = asleep.client('back\\slash "quotes"')
    assert cli.main(["vault", "status", "--prometheus", "--socket", str(asleep.socket)]) == 0
    strange.close()
    text = capsys.readouterr().out
    found = samples(text)
    assert found["cumem_sleep_vault_asleep_bytes"] == PAGE
    assert found["cumem_sleep_vault_clients"] == 2
    assert found[f'cumem_sleep_vault_gpu_awake_bytes{{gpu="{strange.gpus[0]}"}}'] == PAGE
    assert any(name.endswith('name="back\\\\slash \\"quotes\\""}') for name in found)
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+(\{(\w+="([^"\\]|\\.)*",?)+\})? [-+.e\d]+', line), line
    assert len(found) == len([line for line in text.splitlines() if not line.startswith("#")])


def test_every_metric_is_said(asleep: RunningVault) -> None:
    client = asleep.client("prometheus")
    text = command.VaultReport(client.status()).prometheus()
    client.close()
    table = {**metrics.VAULT, **metrics.VAULT_GPU, **metrics.VAULT_CLIENT}
    not_yet = {f"{metrics.PREFIX}vault_gpu_last_in_gbps"}  # nothing was copied in
    assert set(re.findall(r"^# TYPE (\w+)", text, re.M)) | not_yet == {metric.full_name for metric in table.values()}


def test_status_without_a_vault_says_so(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o700)
    assert cli.main(["vault", "status", "--json", "--socket", str(tmp_path / "none.sock")]) == 2
    told = capsys.readouterr()
    assert "no vault answers at" in told.err
    assert "no vault answers at" in json.loads(told.out)["error"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["vault"], "--memory is missing"),
        (["vault", "--memory", "1MiB"], "at least 2097152 bytes"),
        (["vault", "--memory", "9999TiB"], "memory=10994016766132224: this host has .*: give the vault less"),
        (
            ["vault", "--memory", "64MiB", "--relay", "auto", "0"],
            "gpu='auto': expected a visible GPU, one of GPU-.*, 0",
        ),
        (["vault", "--memory", "64MiB", "--gpus", "7"], "gpu='7': expected a visible GPU, one of GPU-.*, 0"),
        (["vault", "--memory", "64MiB", "--metrics", "no.such.host.:1"], "metrics at no.such.host.:1: .*--metrics"),
    ],
)
def test_bad_usage_is_told(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    tmp_path.chmod(0o700)
    assert cli.main([*arguments, "--socket", str(tmp_path / "vault.sock")]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "vault.sock").exists()


def test_what_is_not_in_order_is_the_conclusion() -> None:
    assert (
        command.VaultReport({"short": "host memory", "files_failure": ""}).conclusion()
        == "it cannot take more memory now: host memory"
    )
    assert command.VaultReport({"short": "", "files_failure": ""}).conclusion() == ""


def test_nobody_has_to_read_what_it_says(folder: pathlib.Path) -> None:
    script = """
        import subprocess, sys
        from cumem_sleep.vault.client import *
        command = [sys.executable, "-m", "cumem_sleep", "vault", "--memory", "64MiB", "--socket", SOCKET]
        vault = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert "listens" in vault.stderr.readline()
        vault.stderr.close()
        for _ in range(3):
            client = VaultClient(Path(SOCKET))
            with raises(VaultLost, "cut this process off"):
                client._ask("dance")  # the vault says so, to nobody
            client.close()
        vault.terminate()
        assert vault.wait(30) == 0
        """
    process = run_script(script.replace("SOCKET", repr(str(folder / "vault.sock"))))
    assert process.returncode == 0, process.stderr
