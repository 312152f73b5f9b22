"""A run's figures, step by step: metrics.jsonl for programs, TensorBoard events for eyes.

Rows of a step are either a training row, which has a "loss", or an evaluation row, which has "heldout_bits_per_byte".
"""

import json
import os
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from transformer_jax.errors import UserError


class MetricsLog:
    """The open log of a run. What was logged after `start`, the step that the run goes on from, is taken back."""

    def __init__(self, folder: Path, start: int) -> None:
        self._path = folder / "metrics.jsonl"
        self.rows = _rows_up_to(self._path, start)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        os.replace(temporary, self._path)
        self._file = self._path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(folder / "events"), purge_step=start + 1)

    def write(self, step: int, **figures: Any) -> None:
        """Add a row; numbers become TensorBoard scalars and text TensorBoard text."""
        row = {"step": step, **figures}
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in figures.items():
            if isinstance(value, str):
                self._events.add_text(name, value, step)
            else:
                self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Finish both files."""
        self._file.close()
        self._events.close()


def _rows_up_to(path: Path, step: int) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if row["step"] <= step:
                rows.append(row)
        except (ValueError, TypeError, KeyError):
            # A process that was killed while it wrote leaves half a last line.
            if number < len(lines) and any(lines[number:]):
                raise UserError(
                    f"{path}: line {number} is not a row of metrics; move the file aside to go on"
                ) from None
    return rows
