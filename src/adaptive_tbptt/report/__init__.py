"""The HTML report of one run folder or several, as `atbptt report` writes it."""

from .page import write_run_report

__all__ = ["write_run_report"]
