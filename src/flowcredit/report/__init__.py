"""One HTML page about a run, complete in itself."""

from flowcredit.report.page import build_report

__all__ = ["build_report"]
