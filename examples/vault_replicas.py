"""Two replicas of one model and a vault: the second one copies nothing when it sleeps, and the host keeps one copy.

python examples/vault_replicas.py                            # PyTorch and a GPU
CUMEM_SLEEP_DRIVER=sim python examples/vault_replicas.py     # neither: memory without a model, on the simulated driver
"""

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from typing import Any

from cumem_sleep import CuMemAllocator

MIB = 1 << 20
COMMAND = [sys.executable, "-m", "cumem_sleep", "vault"]


def reaches_a_gpu() -> bool:
    """Whether PyTorch is there, and does."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def load(allocator: CuMemAllocator) -> Any:
    """The same weights in every replica."""
    if allocator.settings.driver == "cuda" and reaches_a_gpu():
        import torch

        torch.manual_seed(0)
        with allocator.use_memory_pool("weights"):
            return torch.randn(20 * MIB, device="cuda", dtype=torch.bfloat16)
    return allocator.malloc(40 * MIB, tag="weights")  # simulated memory begins with zeros


def serve(name: str, orders: Connection) -> None:
    """One replica's process. CUMEM_SLEEP_VAULT says where its backups go; nothing else changes."""
    allocator = CuMemAllocator.get_instance()
    weights = load(allocator)
    orders.send("ready")
    while (order := orders.recv()) != "end":
        report = allocator.wake_up() if order == "wake" else allocator.sleep(level=1)
        print(f"{name}: {report}", flush=True)
        orders.send(report)
    del weights


def run(socket: str) -> None:
    """Two replicas, as clients of the vault at `socket`."""
    os.environ["CUMEM_SLEEP_VAULT"] = socket
    spawn = multiprocessing.get_context("spawn")  # CUDA does not work in a fork made after its first use
    replicas: list[Connection] = []
    for name in ("A", "B"):
        ours, theirs = spawn.Pipe()
        spawn.Process(target=serve, args=(name, theirs), daemon=True).start()
        theirs.close()  # now only that process has it: if it ends, we are told, and do not wait for ever
        try:
            assert ours.recv() == "ready"
        except EOFError:
            raise SystemExit(f"vault_replicas.py: replica {name} did not start; its error is above") from None
        replicas.append(ours)

    def tell(replica: Connection, order: str) -> Any:
        replica.send(order)
        return replica.recv()

    first, second = (tell(replica, "sleep") for replica in replicas)
    assert first.copied_bytes == 40 * MIB
    assert (second.copied_bytes, second.found_bytes) == (0, 40 * MIB)
    subprocess.run([*COMMAND, "status", "--socket", socket], check=True)
    for replica in replicas:
        assert tell(replica, "wake").verified_bytes == 40 * MIB
        replica.send("end")
    for process in multiprocessing.active_children():
        process.join()
    print("one copy served both")


def main() -> None:
    """Start a vault of its own, for as long as this runs."""
    with tempfile.TemporaryDirectory() as folder:  # nobody else can write to it
        socket = f"{folder}/vault.sock"
        vault = subprocess.Popen(
            [*COMMAND, "--memory", "256MiB", "--socket", socket], stderr=subprocess.PIPE, text=True
        )
        try:
            assert vault.stderr is not None
            said = []
            for line in vault.stderr:
                said.append(line)
                if "listens at" in line:
                    break
            else:
                raise SystemExit(f"vault_replicas.py: the vault did not start: {''.join(said)}")
            run(socket)
        finally:
            vault.terminate()
            vault.communicate()


if __name__ == "__main__":
    main()
