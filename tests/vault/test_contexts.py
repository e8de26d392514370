"""A CUDA context that the vault makes takes long where much memory is pinned: only who needs it waits for it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from running import MIB, RunningVault, eventually
from support import assert_clean_exit, run_script

from cumem_sleep import sim

pytestmark = [pytest.mark.sim, pytest.mark.slow]

TWO_GPUS = {"CUMEM_SLEEP_SIM_DEVICES": "2"}
CONTEXT = 6 * MIB
StartVault = Callable[..., RunningVault]


def has_context(vault: RunningVault, at: int) -> bool:
    """On the GPU of this number in its list."""
    used, _ = sim.process_memory(vault.process.pid, vault.status()["gpus"][at]["uuid"])
    return used >= CONTEXT


@pytest.mark.parametrize("named", [["1", "0"], ["1,0"]])
def test_gpus_that_are_named_have_their_contexts_before_a_client_comes(
    start_vault: StartVault, named: list[str]
) -> None:
    vault = start_vault("16MiB", "--gpus", *named, CUMEM_SLEEP_SIM_CONTEXT_BYTES=str(CONTEXT), **TWO_GPUS)
    eventually(lambda: has_context(vault, 0) and has_context(vault, 1), "both are there")
    eventually(lambda: vault.said("takes about 512.03 MiB of GPU 1 and 0 for a context\n"), "it has said so")


def test_of_all_gpus_the_first_has_its_context_before_a_client_comes(start_vault: StartVault) -> None:
    vault = start_vault("16MiB", CUMEM_SLEEP_SIM_CONTEXT_BYTES=str(CONTEXT), **TWO_GPUS)
    vault.wait_until_ready()
    eventually(lambda: has_context(vault, 0), "the first one is there")
    assert not has_context(vault, 1)
    said = "takes about 512.03 MiB of GPU 0 for a context; of each other one when its first client comes"
    eventually(lambda: vault.said(said), "it has said so")


def test_gpus_that_relay_have_their_contexts_before_a_client_comes(start_vault: StartVault) -> None:
    vault = start_vault("16MiB", "--relay", "1", CUMEM_SLEEP_SIM_CONTEXT_BYTES=str(CONTEXT), **TWO_GPUS)
    eventually(lambda: has_context(vault, 0) and has_context(vault, 1), "both are there")
    eventually(lambda: vault.said("takes about 512.03 MiB of GPU 0 and 1 for a context\n"), "it has said so")


@pytest.mark.parametrize(
    ("options", "refusal"),
    [([], ""), (["--relay", "0,1"], ""), (["--relay", "off"], "--relay leaves it out")],
)
def test_links_of_gpus_in_use_help_each_other_unless_told_not_to(
    start_vault: StartVault, options: list[str], refusal: str
) -> None:
    vault = start_vault("16MiB", "--gpus", "0", "1", *options, **TWO_GPUS)
    eventually(lambda: all(gpu["helpers"] for gpu in vault.status()["gpus"]), "both have links")
    assert [list(gpu["helpers"].values()) for gpu in vault.status()["gpus"]] == [[refusal], [refusal]]


def test_the_first_client_of_a_gpu_keeps_nobody_else_waiting(start_vault: StartVault) -> None:
    """Its context would take five minutes. Clients of another GPU do all that there is to do meanwhile."""
    vault = start_vault("16MiB", **TWO_GPUS, CUMEM_SLEEP_SIM_CONTEXT_US_PER_MIB=str(20 * 10**6))
    vault.wait_until_ready()
    script = f"""
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from running import *
        allocator, memory = CuMemAllocator(Settings(driver="sim")), Memory()
        allocator.get_current_usage()
        connect = lambda name: VaultClient(pathlib.Path({str(vault.socket)!r}), name, 30)
        first, second, gone = connect("first"), connect("second"), connect("gone")
        ended = []

        def back_up_on_the_second_gpu(client):
            with contextlib.suppress(VaultError):  # of the one that has gone, if it looks again before the end
                Segment(client, allocator.malloc(PAGE, "weights", 1), PAGE, 1).back_up()
                ended.append(client)

        def is_copying(name):
            return any(each["lent_bytes"] for each in first.status()["clients"] if each["name"] == name)

        for client in (second, gone):
            threading.Thread(target=back_up_on_the_second_gpu, args=(client,), daemon=True).start()
        eventually(lambda: is_copying("second") and is_copying("gone"), "they wait for the context")
        gone._channel.close()  # its memory is given back when the context is there
        mine = Segment(first, allocator.malloc(PAGE, "weights"), PAGE)
        for number in range(3):
            content = memory.fill_random(mine.address, PAGE)
            backup = mine.back_up()
            seal(first, backup, str(number))
            memory.fill_random(mine.address, PAGE)
            mine.read(backup)
            assert memory.read(mine.address, PAGE) == content
            first.release([backup])
        assert is_copying("second")
        assert not ended
        os._exit(0)
        """
    assert_clean_exit(run_script("import contextlib, os, pathlib, sys, threading", script, **TWO_GPUS))
