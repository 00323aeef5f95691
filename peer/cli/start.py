"""What `start` was asked for."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Start:
    """The arguments of `start` that no peer's configuration has.

    Attributes:
        run_toml: the run spec; None goes on with the home's run.
        new_run: put the home's run away, and found another.
        restore: the URL of uploads to fill the home from, where it is empty.
    """

    run_toml: Path | None
    new_run: bool
    restore: str | None = None
