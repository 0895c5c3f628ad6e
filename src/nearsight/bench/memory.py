"""How much memory something takes at its highest."""

import torch


class PeakMemory:
    """How far memory grew at its highest since this object was made.

    On a CPU that is the resident set (Linux), which grows by too little where the allocator still holds memory from
    before. With `exact`, nothing is said there: differences between small pieces of work drown in it.
    """

    def __init__(self, device: str, *, exact: bool = False) -> None:
        self.on_gpu = torch.device(device).type == "cuda"
        self.before: int | None = None
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        elif not exact:
            try:
                # "5" resets the peak of the resident set (man 5 proc).
                with open("/proc/self/clear_refs", "w") as file:
                    file.write("5")
            except OSError:
                return
            self.before = _resident_bytes("VmRSS")

    def growth(self) -> int | None:
        """In bytes; None where it cannot be known."""
        if self.before is None:
            return None
        peak = torch.cuda.max_memory_allocated() if self.on_gpu else _resident_bytes("VmHWM")
        # Linux counts the resident set in batches, so that a peak can read lower than what was there before.
        return max(0, peak - self.before)


def _resident_bytes(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))
