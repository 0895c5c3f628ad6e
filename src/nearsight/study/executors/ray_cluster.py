"""Ray, imported when it is asked for, and a connection to a cluster of it."""

import contextlib
import importlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from nearsight.errors import InputError


def import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise InputError(f"Ray cannot be imported ({error}); install it with `pip install nearsight[ray]`") from error


def check_device(device: str) -> None:
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"{device!r} is no device of Ray's workers; use auto, cpu or cuda")


def device_of_workers(ray: Any, device: str) -> str:
    """auto: a GPU for each, if the cluster has any now."""
    if device != "auto":
        return device
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected to a cluster; one that the caller is connected to already stays so."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    with _own_signals():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            raise InputError(
                f"no Ray cluster at {address!r}; start one with `ray start --head`, or use --address local"
            ) from error
        except RuntimeError as error:  # another version of Ray, say
            raise InputError(
                f"the Ray cluster at {address!r} cannot be used: {' '.join(str(error).split())}"
            ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray sets handlers that end the process at once, but whoever runs a study has better ones."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # else it is not Python's
                signal.signal(number, handler)
