"""One self-contained HTML page of a run folder: no network, light and dark, readable without JavaScript."""

from ptq.report.page.files import RunFiles
from ptq.report.page.render import MOST_BYTES, render, write_page

__all__ = ["MOST_BYTES", "RunFiles", "render", "write_page"]
