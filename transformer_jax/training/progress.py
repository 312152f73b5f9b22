"""What a person sees of a run while it trains: a bar on a terminal, a line now and then elsewhere."""

import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from transformer_jax.report import SECONDS_BETWEEN_LINES


class TrainingProgress:
    """Loss, rate, fraction of the machine's matmul peak, and time left. Use it as a context manager."""

    def __init__(self, console: Console, start: int, steps: int, flops_per_step: float, peak: float) -> None:
        self.console = console
        self._steps, self._flops_per_step, self._peak = steps, flops_per_step, peak
        # The rate is that of the latest steps; evaluations and checkpoints between them are taken out by `resume`.
        self._seconds: deque[tuple[float, float]] = deque(maxlen=20)
        self._last: float | None = None
        self._printed = time.monotonic()
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("compiling", total=steps, completed=start)

    def __enter__(self) -> "TrainingProgress":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def advance(self, step: int, loss: float, tokens: float) -> None:
        """Show that step `step` is done."""
        now = time.monotonic()
        if self._last is not None:
            self._seconds.append((tokens, now - self._last))
        self._last = now
        text = f"loss {loss:.3f}{self._rates()}"
        self._bar.update(self._task, completed=step, description=text)
        if not self.console.is_terminal and (now - self._printed > SECONDS_BETWEEN_LINES or step == self._steps):
            self._printed = now
            self.console.print(f"step {step}/{self._steps}  {text}", highlight=False)

    def resume(self) -> None:
        """Leave what happened since the last step out of the rate."""
        self._last = time.monotonic()

    @property
    def tokens_per_s(self) -> float | None:
        """The rate of the latest steps; None before the second one."""
        seconds = sum(second for _, second in self._seconds)
        return sum(tokens for tokens, _ in self._seconds) / seconds if self._seconds else None

    def _rates(self) -> str:
        if self.tokens_per_s is None:
            return ""
        seconds = sum(second for _, second in self._seconds)
        fraction = self._flops_per_step * len(self._seconds) / seconds / self._peak
        return f"  {self.tokens_per_s:,.0f} tokens/s  {fraction:.0%} of matmul peak"
