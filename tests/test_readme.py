"""The README's commands, run as a newcomer runs them, so that the README stays true.

Every `sh` or `console` block of README.md has a comment before it that a reader of the page does not see:

    <!-- check -->                        the block is run
    <!-- check: old => new -->            it is run with `old` replaced by `new`; one replacement a line
    <!-- no check: reason -->             it is not run

The blocks are one shell script, in order, in a copy of the repository where `.venv` is the environment of this test.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

BLOCK = re.compile(
    r"^(?:<!--(?P<marker>(?:(?!-->).)*)-->\s*^)?```(?P<language>sh|bash|shell|console)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SECONDS_ALLOWED = 900


class Block(NamedTuple):
    """Commands to run, and the line of the README that they begin on."""

    line: int
    commands: str


def checked_blocks(markdown: str) -> list[Block]:
    """Find the blocks to run, with their replacements made. Raises `ValueError` at a block without a marker."""
    blocks = []
    for match in BLOCK.finditer(markdown):
        line = markdown.count("\n", 0, match.start("body")) + 1
        kind, _, argument = (match["marker"] or "").strip().partition(":")
        commands = _typed(match["body"]) if match["language"] == "console" else match["body"]
        if kind == "check":
            blocks.append(Block(line, _replace(commands, argument, line)))
        elif kind != "no check" or not argument.strip():
            raise ValueError(f"line {line}: a block of commands needs <!-- check --> or <!-- no check: reason -->")
    return blocks


def _typed(console: str) -> str:
    """Keep what follows the prompts of a console and drop what the commands print."""
    typed, continues = [], False
    for line in console.splitlines():
        if continues or line.startswith("$ "):
            typed.append(line if continues else line.removeprefix("$ "))
            continues = line.endswith("\\")
    return "".join(f"{line}\n" for line in typed)


def _replace(commands: str, replacements: str, line: int) -> str:
    for replacement in filter(None, map(str.strip, replacements.splitlines())):
        old, arrow, new = (part.strip() for part in replacement.partition(" => "))
        if not arrow or old not in commands:
            raise ValueError(f"line {line}: {replacement!r} is not `old => new` with an old that is in the block")
        commands = commands.replace(old, new)
    return commands


def test_blocks_are_found_with_their_replacements_made():
    markdown = """
<!-- a remark -->
Text.

<!-- check -->
```sh
first
```

<!-- check: --steps 300 => --steps 3
     out => /tmp/out -->
```console
$ train --steps 300 \\
    --folder out
step 1: out of 300
$ second
```

<!-- no check: needs another machine -->
```sh
third
```
"""
    assert checked_blocks(markdown) == [
        Block(7, "first\n"),
        Block(13, "train --steps 3 \\\n    --folder /tmp/out\nsecond\n"),
    ]


@pytest.mark.parametrize(
    "block",
    [
        "```sh\nunmarked\n```",
        "<!-- check -->\nText between.\n```sh\nunmarked\n```",
        "<!-- no check -->\n```sh\nwithout a reason\n```",
        "<!-- check: absent => new -->\n```sh\ncommand\n```",
        "<!-- check: command -->\n```sh\ncommand\n```",
    ],
    ids=["unmarked", "marker-elsewhere", "no-reason", "nothing-to-replace", "no-arrow"],
)
def test_a_block_that_would_escape_the_check_is_an_error(block: str):
    with pytest.raises(ValueError, match=r"^line \d+: "):
        checked_blocks(block)


@pytest.mark.slow
def test_the_commands_of_the_readme_succeed(repository: Path, tmp_path: Path):
    blocks = checked_blocks((repository / "README.md").read_text())
    assert blocks, "README.md has no block marked <!-- check -->"
    home = tmp_path / "transformer_jax"
    shutil.copytree(repository, home, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
    (home / ".venv").symlink_to(sys.prefix)
    script = "set -euo pipefail\n" + "".join(f"echo '== README.md, line {line}'\n{text}" for line, text in blocks)
    status, output = _run(script, home, tmp_path / "output")
    assert status == 0, f"the README's commands exit with {status}:\n{output[-20_000:]}"


def _run(script: str, folder: Path, log: Path) -> tuple[int, str]:
    """Run a shell script as a user would, then end whatever it left in the background."""
    environment = os.environ | {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    with log.open("wb") as stream:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = shell.wait(timeout=SECONDS_ALLOWED)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    return status, log.read_text(errors="replace")
