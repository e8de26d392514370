"""The texts of `--help`, apart from the options."""

from __future__ import annotations

import textwrap
from dataclasses import fields

from ..settings import VARIABLES, plain

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE, TOKEN_VARIABLE = "CUMEM_SLEEP_SERVE_URL", "CUMEM_SLEEP_SERVE_TOKEN"

WHOLE = """\
usage: cumem-sleep COMMAND ...

Sleep mode for GPU memory: weights and KV cache give their GPU memory back in
seconds and take it again at the same addresses, in the same process.
In vLLM: install this package, and start with --enable-sleep-mode.

on this machine:
  demo      sleep and wake a small model, or yours, and compare every byte; also without a GPU
  doctor    check whether this machine is ready, and fast, and what it is good for
  bench     measure sleep and wake here, compared with the link

more than one process:
  vault     keep the backups of all processes of this host
  serve     several models behind one port (serve --demo needs no GPU)
  status, sleep, wake, stop    look at the models of a running front, and tell them
  drain     have one node of several take no new requests

for other programs:
  shim      print the folder of a package that takes torch_memory_saver's place

exit codes:  0 all is well, 1 a check failed or bytes differ, 2 bad usage or an error,
             130 interrupted, 141 the reader of the output closed it

cumem-sleep COMMAND --help explains a command, cumem-sleep help settings every environment
variable, cumem-sleep help models.yaml every key of serve's file. The pages: docs/ of the sources."""

DEMO_DESCRIPTION = """\
Loads a model's weights, allocates a KV cache, and does with both what a server
does: sleep at level 1 (weights are copied to the host, the KV cache is dropped),
wake, sleep again (nothing changed, so nothing is copied), wake the weights, then
the KV cache, sleep at level 2 (both are dropped), wake, reload the weights.

After each wake every byte of the weights is read back from the device and compared
with the source, and every address is compared with the one before.

Without a GPU it runs on the simulated driver, and says so."""

DEMO_EPILOG = """\
examples:
  cumem-sleep demo
  cumem-sleep demo model.safetensors --kv 8GiB
  cumem-sleep demo Qwen3-8B/
  cumem-sleep demo model-0000*-of-00004.safetensors --device 1 --rounds 3
  CUMEM_SLEEP_DRIVER=sim cumem-sleep demo --json | jq .ok"""

DOCTOR_DESCRIPTION = """\
Checks the driver, the GPUs, the host memory and the Python packages, and says
what is wrong or slow and what to do about it. To find out what the driver really
grants, it briefly allocates 2 MiB (and a CUDA context) on each GPU, and starts the helper
process of level 3. It makes no checkpoint, and changes nothing.

A warning means less speed or a missing feature; a failure means that the layer cannot work."""

DOCTOR_EPILOG = """\
examples:
  cumem-sleep doctor
  cumem-sleep doctor --json | jq '.checks[] | select(.status != "ok")'
  CUMEM_SLEEP_DRIVER=sim cumem-sleep doctor"""

BENCH_DESCRIPTION = """\
Measures what sleep and wake cost on this machine, in a process of its own: the link in
both directions; the first sleep; sleeps after nothing, one segment or everything changed,
without backups, and after prepare(); level 2; and wakes with and without the KV cache,
right after the sleep and some seconds later (meanwhile the driver scrubs freed memory).

The weights have the 258 segments that a Qwen3-32B has in vLLM, scaled to the size, or
equal ones (--segment-size). Contents are random; each wake compares their digests. On a
GPU host memory is prefaulted first, since virtual machines hand it out slowly.

With --level 3, instead: level 1 and level 3 in turn, and of level 3 what it adds: lock and
checkpoint, restore and unlock, and what is left on the GPU.

The default sizes are those of a 32B model in vLLM on an H200, or as much as fits.
On the simulated driver everything is small, and the times mean nothing."""

BENCH_EPILOG = """\
examples:
  cumem-sleep bench
  cumem-sleep bench --weights 30GiB --kv 20GiB --device 1
  cumem-sleep bench --rounds 5 --json > bench.json
  cumem-sleep bench --weights 8GiB --segment-size 2MiB
  cumem-sleep bench --level 3 --rounds 10
  CUMEM_SLEEP_DRIVER=sim cumem-sleep bench --pause 0

how to read it:
  Seconds are medians. "x link" compares them with the time that the link alone would take.
  "first sleep" allocates and pins host memory; before "prepared sleep", "prepare" has done that."""


HELP_DESCRIPTION = """\
Explains a topic: settings lists every environment variable, with its default."""

SHIM_DESCRIPTION = """\
Prints the folder of a package with another's name and interface, which this layer serves.
First in PYTHONPATH, it takes that one's place, in child processes too. Nothing is installed
or changed; without the variable all is as before."""

SHIM_EPILOG = """\
examples:
  export PYTHONPATH="$(cumem-sleep shim torch_memory_saver)"
  PYTHONPATH=$(cumem-sleep shim torch_memory_saver) python -m sglang.launch_server --enable-memory-saver ..."""

VAULT_DESCRIPTION = """\
One process that owns this host's pinned memory and keeps the backups of all others. They
then pin nothing themselves, and equal bytes are kept once.

It takes its memory in the background, and serves at once with what is there. On each GPU that
it uses it takes about 0.5 GiB and 2 MiB for each GiB of its memory: on those that --gpus names
at once, otherwise on the first one at once and on others when their first client comes.

That client waits until all memory is mapped there (on an H200 2 s for 100 GiB). The vault ends
with SIGTERM or Ctrl-C."""

VAULT_EPILOG = """\
examples:
  cumem-sleep vault --memory 200GiB
  cumem-sleep vault --memory 64GiB --gpus 0 1 --socket /run/models/vault.sock
  cumem-sleep vault --memory 200GiB --metrics 9400
  cumem-sleep vault --memory 64GiB --spill /nvme/cumem-sleep --spill-size 500GiB
  cumem-sleep vault --memory 200GiB --keep-weights 100GiB
  cumem-sleep vault status
  cumem-sleep vault status --json | jq '.clients[].asleep_bytes'
  cumem-sleep vault status --prometheus"""

VAULT_STATUS_DESCRIPTION = """\
Shows the memory of the vault, its GPUs, and its clients. "asleep" is what segments that sleep
need; "awake" are retained backups of segments that are awake, and kept ranges: both are evicted when
memory runs short. "relayed" is what a GPU's link has carried for other GPUs."""

SERVE_DESCRIPTION = """\
Several models behind one OpenAI-compatible port. It starts their servers, puts idle
models to sleep, and wakes a model when a request comes for it.

models.yaml says which models there are; `cumem-sleep help models.yaml` explains every key.
SIGHUP, or a change of the file, reloads what can be. It ends with SIGTERM or Ctrl-C, and its servers too."""

SERVE_EPILOG = """\
examples:
  cumem-sleep serve --demo                 try it: simulated models, no GPU
  cumem-sleep serve models.yaml --check    is the file valid, and will it work here? (exit code 0 or 2)
  cumem-sleep serve models.yaml
  cumem-sleep serve models.yaml --host 0.0.0.0 --port 8080"""

CLIENT_EPILOG = f"""\
environment variables:
  {URL_VARIABLE}     the front to ask (default: {DEFAULT_URL})
  {TOKEN_VARIABLE}   its admin token, or for `status` an API key"""


def environment() -> str:
    """Every variable with its meaning."""
    return "\n".join(_described(each.name, each.default, each.text) for each in VARIABLES.values())


def keys() -> str:
    """Every key of models.yaml, likewise.

    Raises:
        ImportError: packages of `serve` are missing.
    """
    from ..serve.config import KEYS

    return "\n".join(
        _described(prefix + each.name, each.metadata["said"], each.metadata["text"])
        for prefix, section in KEYS.items()
        for each in fields(section)
    )


def _described(name: str, default: str, text: str) -> str:
    words = plain(text).replace("`", "").rstrip(".") + ("" if default == "none" else f" (default: {default})")
    lines = textwrap.wrap(words.replace("`", ""), 100, initial_indent="      ", subsequent_indent="      ")
    return "\n".join((f"  {name}", *lines))


def settings_tables() -> dict[str, str]:
    """The tables of `docs/settings.md`, by the headings of their sections."""
    tables: dict[str, str] = {}
    for variable in VARIABLES.values():
        row = f"| `{variable.name}` | {variable.default} | {variable.text} |\n"
        heading = variable.reader.value
        tables[heading] = tables.get(heading, "| variable | default | |\n|---|---|---|\n") + row
    return tables
