"""``ptq report``: everything that a run folder holds, as one page."""

from typing import TYPE_CHECKING

from ptq.cli import Screen, command

if TYPE_CHECKING:
    from ptq.run import Run


@command
def report(run: "Run", screen: Screen) -> None:
    """Write report.html: one page with everything that the run folder holds, to open, send and print."""
    from ptq.report.page import write_page

    path = write_page(run.folder)
    screen.show([], [path], {"kind": "report", "schema": 1, "bytes": path.stat().st_size})
