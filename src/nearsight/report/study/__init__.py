"""A study's report: tables, the paper's five figures and a verdict per claim, from the results of its runs alone."""

from nearsight.report.study.findings import write_findings
from nearsight.report.study.keeping import write_results
from nearsight.report.study.positions.bridge import write_bridge
from nearsight.report.study.unreported.fit import best_fitting_levels
from nearsight.report.study.writing import write_study_report

__all__ = ["best_fitting_levels", "write_bridge", "write_findings", "write_results", "write_study_report"]
