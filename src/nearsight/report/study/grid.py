"""The grid of patches that a study's models see."""

from collections.abc import Mapping

from nearsight.data.loading import dataset_spec


def patches_per_side(settings: Mapping[str, object]) -> int | None:
    """From what all cells share; None where that does not say it."""
    name, patch = settings.get("data.name"), settings.get("model.patch_size")
    if not isinstance(name, str) or not isinstance(patch, int) or "data.image_size" not in settings:
        return None
    size = settings["data.image_size"] or dataset_spec(name).image_size
    assert isinstance(size, int)
    return size // patch
