"""`milepost report`: one or several runs as one self-contained HTML page.

`runs` reads run folders, `summary` puts them in figures, `curves` makes lines of their metrics, `page` the page. The
page's own code lies in `assets`; charts are drawn by uPlot, which lies there too with its licence.
"""

from milepost.report.page import render
from milepost.report.runs import RunData, read_runs
from milepost.report.summary import summarise

__all__ = ["RunData", "read_runs", "render", "summarise"]
