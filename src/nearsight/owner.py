"""Which process something belongs to, and whether that process is still running."""

import hashlib
import os
import re
import secrets
import socket
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process, so that others can see whether it is still running."""

    host: str
    namespace: str
    """Of process ids: containers of one machine may share a host name, but not these."""
    pid: int
    started: int | None
    """When the process started, in the kernel's ticks: process ids are used again. None where it cannot be read."""
    token: str
    """Distinguishes several owners within a process."""

    @classmethod
    def here(cls, token: str | None = None) -> "Owner":
        pid = os.getpid()
        return cls(
            host=socket.gethostname(),
            namespace=_namespace(),
            pid=pid,
            started=_own_start(pid),
            token=token or secrets.token_hex(8),
        )

    @property
    def is_here(self) -> bool:
        """Whether the process is one of those that can be seen from here."""
        return (self.host, self.namespace) == (socket.gethostname(), _namespace())

    def is_gone(self) -> bool:
        """Whether the process has certainly ended; False for one on another machine, which cannot be seen."""
        return self.is_here and not _is_running(self.pid, self.started)


def process_mark() -> str:
    """This process, in a part of a file's name."""
    pid = os.getpid()
    return f"{_machine()}-{pid}-{_own_start(pid) or 0}"


def has_ended(mark: str) -> bool | None:
    """Whether the process that wrote a mark has ended; None: it cannot be seen from here."""
    machine, pid, started = mark.split("-")
    return not _is_running(int(pid), int(started) or None) if machine == _machine() else None


@lru_cache(maxsize=1)
def _machine() -> str:
    """8 hex digits for the processes that can be seen from here."""
    return hashlib.sha256(f"{socket.gethostname()} {_namespace()}".encode()).hexdigest()[:8]


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _is_running(pid: int, started: int | None) -> bool:
    return _is_alive(pid) and _start_of(pid) == started


def _is_alive(pid: int) -> bool:
    if os.name != "posix":  # elsewhere this would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, but running
        return True
    except OverflowError:  # no process has such a number
        return False
    state = _stat_of(pid)
    return not state or state[0] not in "ZX"  # a zombie has ended and waits for its parent to notice


@lru_cache(maxsize=1)
def _own_start(pid: int) -> int | None:
    """Start of this process, cached because every file that is written needs it; by `pid`, which a fork changes."""
    return _start_of(pid)


def _start_of(pid: int) -> int | None:
    state = _stat_of(pid)
    return int(state[19]) if len(state) > 19 else None


def _stat_of(pid: int) -> list[str]:
    """What Linux reports about a process, from its state on; nothing elsewhere."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return re.sub(r"^.*\) ", "", text, flags=re.DOTALL).split()  # a process's name may hold anything
