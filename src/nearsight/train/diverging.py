"""What is said when a loss is not finite, of runs of any kind."""

from pathlib import Path


def divergence(folder: Path, loss: float, epoch: int) -> str:
    """That it happened, in which epoch (counted from 1), and what is left of the run in this folder."""
    kept = f"the checkpoint of epoch {epoch - 1} is kept" if epoch > 1 else "no epoch was finished"
    return f"the loss of {folder} became {loss} in epoch {epoch}; {kept}"


def way_out_of_divergence(precision: str) -> str:
    """What to try, of runs in this arithmetic."""
    return "Try a lower --protocol.lr" + ("" if precision == "fp32" else ", or --precision fp32")
