"""Training that cannot go on."""


class TrainingError(RuntimeError):
    """Training cannot go on; the run folder keeps the last good checkpoint."""


class LostProcessError(TrainingError):
    """One of several processes that train together is gone, or does not answer."""

    def __init__(self, num_processes: int, reason: str) -> None:
        super().__init__(
            f"another of {num_processes} processes is gone or does not answer ({reason}); the last checkpoint is kept, "
            "and the same command continues, on any number of processes"
        )
