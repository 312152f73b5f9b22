"""A run's figures, step by step: metrics.jsonl for programs, TensorBoard events for eyes.

Rows of a step are either a training row, which has a "loss", or an evaluation row, which has "heldout_bits_per_byte".
"""

import importlib
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tensorboardX import summary
from tensorboardX.record_writer import RecordWriter

from transformer_jax.errors import UserError

# The names in it are made at run time, so no type checker can see them.
event_pb2: Any = importlib.import_module("tensorboardX.proto.event_pb2")


class MetricsLog:
    """The open log of a run. What was logged after `start`, the step that the run goes on from, is taken back.

    Raises `UserError` when the disk is full.
    """

    def __init__(self, folder: Path, start: int) -> None:
        self._path = folder / "metrics.jsonl"
        self.rows = _rows_up_to(self._path, start)
        with self._writing():
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
            os.replace(temporary, self._path)
            self._file = self._path.open("a", encoding="utf-8")
            (folder / "events").mkdir(exist_ok=True)
            # The process's number, because two writers of the same second would share a file.
            name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
            self._events = RecordWriter(str(folder / "events" / name))
            self._write_event(file_version="brain.Event:2")
            # Tells TensorBoard to forget what an earlier process wrote from this step on.
            session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write_event(step=start + 1, session_log=session)

    def write(self, step: int, **figures: Any) -> None:
        """Add a row; numbers become TensorBoard scalars and text TensorBoard text."""
        row = {"step": step, **figures}
        self.rows.append(row)
        with self._writing():
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            for name, value in figures.items():
                shown = summary.text(name, value) if isinstance(value, str) else summary.scalar(name, value)
                self._write_event(step=step, summary=shown)
            self._events.flush()

    def close(self) -> None:
        """Finish both files."""
        # Every row has been flushed; what a full disk has refused is refused again and was said already.
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._events.close()

    def _write_event(self, **fields: Any) -> None:
        self._events.write(event_pb2.Event(wall_time=time.time(), **fields).SerializeToString())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{error.filename or self._path} cannot be written ({error.strerror}); make room and run the same"
                " command again: it goes on from the newest checkpoint"
            ) from None


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
