"""Locks on cells, for several runners that share a study's folder: on one machine, or on several with a common disk.

A lock is a file `<cell>.<generation>`, made so that it fails where it exists (O_EXCL). It says who holds it, and its
holder touches it now and then. A runner that finds the last generation free, or its holder lost, makes the next one: of
several that try only one succeeds, and no runner removes or renames a file that another may have just made. The files
of a cell are removed when the cell is done; a runner that takes a lock then checks whether the cell is to be done.

A holder that was silent for too long (stopped, swapped out, cut off) has lost its cell and does not know it yet. So the
generation fences the cell's folder: before every write there the holder checks that its own is still the last
(`Locks.guarding`), and if not, nothing is written.
"""

import json
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nearsight.errors import InputError
from nearsight.files import LostError, guarded, write_json
from nearsight.owner import Owner

SECONDS_BETWEEN_BEATS = 20.0
SECONDS_UNTIL_STALE = 600.0
"""Silence after which a holder on another machine counts as lost. One on this machine is lost when its process ends."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lock, as others see it."""

    owner: Owner | None
    """None where the file does not say, as in the moment of its making."""
    since: float
    """When it was taken, in seconds of the epoch."""
    age: float
    """Seconds since it was last touched."""

    @property
    def is_stale(self) -> bool:
        return self.age > SECONDS_UNTIL_STALE or (self.owner is not None and self.owner.is_gone())

    @property
    def name(self) -> str:
        return f"{self.owner.host}, process {self.owner.pid}" if self.owner else "somebody"


class Locks:
    """The locks in a folder, and those of them that this runner holds."""

    def __init__(self, folder: Path, *, token: str | None = None, lost_tokens: Collection[str] = ()) -> None:
        """`token` is this holder's own; `lost_tokens` are those of holders that are known to have ended, which on
        another machine would otherwise show only by their silence."""
        self._folder, self._lost_tokens = folder, lost_tokens
        self._owner = Owner.here(token)
        self._held: dict[str, Path] = {}
        self._lost: set[str] = set()
        self._changing = threading.Lock()

    @contextmanager
    def kept_alive(self, seconds: float = SECONDS_BETWEEN_BEATS) -> Iterator["Locks"]:
        """While the body runs, what is held is touched now and then; at its end, nothing is held."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(seconds):
                self.touch()

        thread = threading.Thread(target=beat, name="locks", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            over.set()
            thread.join()
            for cell in list(self._held):
                self.release(cell)

    def take(self, cell: str) -> bool:
        """Whether this runner holds the cell's lock now; False: another does."""
        generation = self._next_generation(cell)
        if not self._is_free(cell, generation):
            return False
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(cell, generation)
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:  # another was faster
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"owner": asdict(self._owner), "since": time.time()}, file)
        with self._changing:
            self._held[cell] = path
            self._lost.discard(cell)
        return True

    def is_free(self, cell: str) -> bool:
        """Whether nobody holds it, or somebody who is lost; the next moment it may be otherwise."""
        return self._is_free(cell, self._next_generation(cell))

    def _is_free(self, cell: str, generation: int) -> bool:
        holder = _read(self._path(cell, generation - 1)) if generation > 0 else None
        return holder is None or holder.is_stale or self.is_known_lost(holder)

    def release(self, cell: str) -> None:
        """Let others take the cell, if this runner holds it. Its generations go on from here."""
        with self._changing:
            path = self._held.pop(cell, None)
        if path is not None and self._is_mine(path):
            write_json(path, {"released": True})

    def clear(self, cell: str) -> None:
        """Remove what there is about a cell that is done."""
        with self._changing:
            self._held.pop(cell, None)
        for generation in reversed(range(self._next_generation(cell))):
            self._path(cell, generation).unlink(missing_ok=True)

    def touch(self) -> None:
        """Show that this runner is alive, and see whether another took over its cells meanwhile."""
        with self._changing:
            for cell, path in self._held.items():
                try:
                    if self._is_last(cell, path):
                        os.utime(path)
                    else:
                        self._lost.add(cell)
                except (InputError, OSError):  # the disk may be away for a while; the next beat tries again
                    continue

    @property
    def lost(self) -> frozenset[str]:
        """Cells that another runner took over, since this one was silent for too long; as far as is known here."""
        return frozenset(self._lost)

    @contextmanager
    def guarding(self, cells: Mapping[str, Path]) -> Iterator[None]:
        """While the body runs, nothing is written into the folders of these cells once they are lost: a `LostError`."""
        with ExitStack() as guards:
            for cell, folder in cells.items():
                guards.enter_context(guarded(folder, partial(self._check, cell)))
            yield

    def _check(self, cell: str) -> None:
        path = self._held.get(cell)
        if not self._folder.is_dir():  # and with it all locks
            raise InputError(
                f"{self._folder} disappeared while it was in use; put it back, and give the same command again"
            )
        if path is None or not self._is_last(cell, path):
            self._lost.add(cell)
            raise LostError(f"run {cell} was taken over by another runner")

    def holder(self, cell: str) -> Holder | None:
        """The holder of a cell, if there is one; it may be stale."""
        generation = self._next_generation(cell)
        return _read(self._path(cell, generation - 1)) if generation > 0 else None

    def is_known_lost(self, holder: Holder) -> bool:
        return holder.owner is not None and holder.owner.token in self._lost_tokens

    def _is_last(self, cell: str, path: Path) -> bool:
        return self._is_mine(path) and not self._path(cell, _generation_of(path) + 1).exists()

    def _is_mine(self, path: Path) -> bool:
        holder = _read(path)
        return holder is not None and holder.owner == self._owner

    def _next_generation(self, cell: str) -> int:
        generation = 0
        while self._path(cell, generation).exists():
            generation += 1
        return generation

    def _path(self, cell: str, generation: int) -> Path:
        return self._folder / f"{cell}.{generation}"


def _read(path: Path) -> Holder | None:
    """Who made this lock; None if it was released."""
    content: Any = None
    try:
        touched = path.stat().st_mtime
        with suppress(ValueError):  # in the making
            content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    stated = content if isinstance(content, dict) else {}
    if stated.get("released"):
        return None
    owner: Owner | None = None
    with suppress(KeyError, TypeError):
        owner = Owner(**stated["owner"])
    return Holder(owner=owner, since=stated.get("since", touched), age=time.time() - touched)


def _generation_of(path: Path) -> int:
    return int(path.name.rpartition(".")[2])
