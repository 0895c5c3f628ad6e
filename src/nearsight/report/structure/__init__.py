"""The report of S3's simulations: attention before and after, phases, sweeps, transfer, and a verdict per claim."""

from nearsight.report.structure.writing import write_structure_report

__all__ = ["write_structure_report"]
