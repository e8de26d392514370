"""What reaches the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.table import Table

from cumem_sleep.tools import cli
from cumem_sleep.tools.console import print_all, say
from cumem_sleep.tools.doctor.report import Check, CheckStatus, DoctorReport


def test_a_terminal_obeys_nothing_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = "a\x1b]0;title\x07 \x9b2J \u202e b\rc :key: [bold]é"
    table = Table(text)
    table.add_row(text)
    print_all(table, text, "two\nlines")
    say(text)
    said = capsys.readouterr()
    assert [line for line in (said.out + said.err).splitlines() if not line.isprintable()] == []
    shown = r"a\x1b]0;title\x07 \x9b2J \u202e b\rc :key: [bold]é"
    assert [line.strip() for line in said.out.splitlines()][-3:] == [shown, "two", "lines"]
    assert said.out.count(shown) == 3
    assert said.err.strip() == shown.replace(r"\r", " ")


def test_what_the_doctor_finds_is_printed_as_letters(capsys: pytest.CaptureFixture[str]) -> None:
    print_all(DoctorReport(True, (Check("driver", CheckStatus.WARN, "\x1b[2J", "\x1b[3J"),), "").table())
    said = capsys.readouterr().out
    assert (r"\x1b[2J" in said, r"\x1b[3J" in said, "\x1b" in said) == (True, True, False)


def test_bad_usage_is_printed_as_letters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", str(tmp_path), "\x1b[2J"])
    assert r"unrecognized arguments: \x1b[2J" in capsys.readouterr().err
