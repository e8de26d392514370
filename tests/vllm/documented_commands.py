"""The documentation's `vllm serve` commands, read by vLLM's own parser.

A program: what it imports has vLLM load its plugins, which is not to happen in the process of other tests.
"""

from __future__ import annotations

import importlib
import pathlib
import re
import shlex
import sys
from typing import Any

from environment import simulate_cuda

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("vllm", "vault")))
AT = r"^(?: *|\w+=\w+ |docker run .* IMAGE )(vllm serve [^&\n]*)"
COMMANDS = [command for page in PAGES for command in re.findall(AT, page.read_text(), re.MULTILINE)]


def first_of(name: str, *modules: str) -> Any:
    """`name` from the first module that has it: vLLM moves them."""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise AssertionError(f"{name} is in none of {', '.join(modules)}")


def check_that_vllm_takes(command: str) -> None:
    kind = first_of("FlexibleArgumentParser", "vllm.utils.argparse_utils", "vllm.utils")
    make = first_of("make_arg_parser", "vllm.entrypoints.openai.cli_args", "vllm.entrypoints.common.cli_args")
    arguments = shlex.split(command.replace('"$1"', "model").replace('"$2"', "8001"))
    options = make(kind()).parse_args(arguments[2:])
    assert options.enable_sleep_mode
    assert list(options.middleware) == ["cumem_sleep.vllm.SleepGate"] * ("--middleware" in arguments)


if __name__ == "__main__":
    simulate_cuda(pathlib.Path(sys.argv[1]))
    assert len(COMMANDS) >= 4
    for each in COMMANDS:
        check_that_vllm_takes(each)
    print(f"{len(COMMANDS)} commands")
