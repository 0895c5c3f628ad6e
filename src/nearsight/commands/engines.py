"""Who does work that can be divided, and the options that only some of them take."""

from typing import Literal

from nearsight.errors import InputError

Engine = Literal["local", "processes", "ray"]
"""This process, several of this machine, or a Ray cluster."""
DEFAULT_ADDRESS = "auto"
"""Of Ray: the cluster that runs here."""


def check_engine(engine: Engine, *, workers: int | None, address: str) -> None:
    """Refuse an option that says nothing to the engine."""
    if workers is not None and engine != "processes":
        raise InputError(f"--workers is for --engine processes, not for {engine}")
    if address != DEFAULT_ADDRESS and engine != "ray":
        raise InputError(f"--address is for --engine ray, not for {engine}")
