"""What --what of `nearsight measure` asks for."""

from collections.abc import Sequence

from nearsight.errors import InputError, unknown_name
from nearsight.lens import WHAT
from nearsight.lens.measurement import MEASUREMENTS


def check_what(what: Sequence[str], num_models: int) -> tuple[str, ...]:
    """The names that --what gives, separated by spaces or commas, each once."""
    names = tuple(dict.fromkeys(name for text in what for name in text.replace(",", " ").split()))
    for name in names:
        if name not in WHAT:
            raise unknown_name("measurement of --what", name, WHAT)
    if "cka" in names and num_models > 2:
        raise InputError(f"--what cka compares the layers of one model or of two, not of {num_models}")
    return names


def about_what() -> str:
    """For the help: all there is, also what registered itself elsewhere."""
    return "\n".join(["--what adds", *(f"  {name}: {about}" for name, about in WHAT.items())])


def in_the_table(what: Sequence[str]) -> list[str]:
    """Those that `nearsight.measure` takes."""
    return [name for name in what if name in MEASUREMENTS]
