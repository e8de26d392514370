"""Runs a benchmark's questions, each in a process of its own, and keeps what was answered if a later one fails."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from record import write

PRINTED = 1500  # characters of an answer; the file has all


def main(doc: str, questions: Mapping[str, Callable[[], Any]], timeout_s: float) -> None:
    """The command line of a script that has these questions."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the raw result goes (JSON)")
    parser.add_argument("--only", choices=questions, help="answer this question, on standard output")
    parser.add_argument("--questions", nargs="+", choices=questions, default=list(questions), help="these only")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(questions[arguments.only]()))
        return
    if arguments.out is None:
        parser.error("--out is missing")
    answers: dict[str, Any] = {}
    for name in arguments.questions:
        answers[name] = answer(name, timeout_s)
        print(name, json.dumps(answers[name])[:PRINTED], flush=True)
        write(arguments.out, answers)
    if any("error" in each for each in answers.values()):
        sys.exit("some questions have no answer")


def answer(name: str, timeout_s: float) -> dict[str, Any]:
    """What a fresh process of this script says, or why it says nothing."""
    command = [sys.executable, sys.argv[0], "--only", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {timeout_s} s"}
    if done.returncode != 0:
        return {"error": done.stderr[-2000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
