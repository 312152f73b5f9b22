"""Tables and pictures for people. This file knows numbers, not models."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rich.console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

SECONDS_BETWEEN_LINES = 10.0
"""Of progress, where there is no terminal to redraw a bar on."""

SECONDS_WITHOUT_BAR = 1.0
"""What is done sooner needs no bar."""


class Console(rich.console.Console):
    """Prints for people, and falls silent when nobody reads any more: a closed pipe must not end a training run."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def reading_progress(
    console: rich.console.Console | None = None, unit: str = "parameters"
) -> Iterator[Callable[[int, int], None]]:
    """Show how much of a model or a text has been read, on stderr: a bar on a terminal, a line now and then elsewhere.

    Yields what takes how many of how many units have been read. What is quick is not shown at all.
    """
    console = rich.console.Console(stderr=True) if console is None else console
    columns = (TextColumn("reading {task.fields[millions]}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    # What is printed meanwhile must go where it is meant to.
    bar = Progress(*columns, console=console, transient=True, redirect_stdout=False)
    task = bar.add_task("reading", start=False, millions="")
    started = printed = 0.0

    def report(done: int, total: int) -> None:
        nonlocal started, printed
        now = time.monotonic()
        if not started:
            started = printed = now
            bar.start_task(task)
        bar.update(task, completed=done, total=total, millions=f"{total / 1e6:,.0f} M {unit}")
        if console.is_terminal and now - started > SECONDS_WITHOUT_BAR:
            # Does nothing to one that is there.
            bar.start()
        elif not console.is_terminal and now - printed > SECONDS_BETWEEN_LINES:
            printed = now
            console.print(f"{done / 1e6:,.0f}/{total / 1e6:,.0f} M {unit} read", highlight=False)

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Lay rows of text out as a table whose first column is names and whose others are figures."""
    table = Table(title=title, title_justify="left", title_style="bold", min_width=len(title))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def plot_curves(rows: Sequence[Mapping[str, Any]], baselines: Mapping[str, float], path: Path) -> None:
    """Draw a run's training loss and held-out bits per byte, or held-out loss, over its steps as a PNG.

    `rows` are the records of metrics.jsonl; `baselines` are horizontal lines beside the bits per byte.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    steps = [row for row in rows if "loss" in row]
    left.plot([row["step"] for row in steps], [row["loss"] for row in steps], linewidth=0.8)
    left.set(xlabel="step", ylabel="nats per token", title="Training loss")
    figure_name, unit = "heldout_bits_per_byte", "bits per byte"
    if not any(figure_name in row for row in rows):
        figure_name, unit = "heldout_loss", "nats per hidden token"
    evals = [row for row in rows if figure_name in row]
    right.plot([row["step"] for row in evals], [row[figure_name] for row in evals], marker="o", label="model")
    for index, (name, value) in enumerate(baselines.items()):
        right.axhline(value, linestyle="--", linewidth=0.8, color=f"C{index + 1}", label=name)
    right.set(xlabel="step", ylabel=unit, title="Held-out text")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
