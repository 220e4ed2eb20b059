"""Reports to look at: one HTML file with the timeline of a run, its curves, its tables and its roofline.

A report needs no network and no other file. Tables and the roofline are plain HTML and SVG. The timeline is drawn by
the scripts in assets/js, from columns that are packed into the page.
"""

from __future__ import annotations

from moesched.report.pages import write_comparison_page, write_run_page

__all__ = ["write_comparison_page", "write_run_page"]
