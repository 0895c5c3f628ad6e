"""A study's report: tables, the paper's five figures and a verdict per claim, from the results of its runs alone."""

from nearsight.report.study.writing import write_study_report

__all__ = ["write_study_report"]
