"""What probes found in models, side by side: tables, figures, differences over seeds, and a verdict on S2's claims."""

from nearsight.report.probes.results import ProbedModel, ProbeResults
from nearsight.report.probes.writing import write_probe_report

__all__ = ["ProbeResults", "ProbedModel", "write_probe_report"]
