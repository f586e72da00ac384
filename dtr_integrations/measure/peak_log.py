"""The peaks of a run, one file a rank, one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path

from ..core.peak import PeakReport

__all__ = ["PeakLog", "read_peak_log"]


class PeakLog:
    """Writes `run_dir/peaks-rank{rank}.jsonl`.

    A log belongs to one run: the first `append` (or `start`) of a new `PeakLog` replaces the file that an
    earlier run, resumed or not, has left in the same folder. Each line is on disk when `append` returns, so
    that a run that is killed for its memory still leaves its peaks. No file is held open between calls.
    """

    def __init__(self, run_dir: str | Path, rank: int) -> None:
        self.path = Path(run_dir) / f"peaks-rank{rank}.jsonl"
        self._started = False

    def start(self) -> None:
        """Makes the folder and an empty file. Raises OSError where that cannot be done."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("", encoding="utf-8")
        self._started = True

    def append(self, report: PeakReport) -> None:
        """Adds one line. Raises OSError where the folder cannot be written to."""
        if not self._started:
            self.start()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(report.to_dict()) + "\n")


def read_peak_log(path: str | Path) -> tuple[PeakReport, ...]:
    """The reports of one log, in order. Raises OSError, or ValueError that names the bad line."""
    reports = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            reports.append(PeakReport.from_dict(json.loads(line)))
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return tuple(reports)
