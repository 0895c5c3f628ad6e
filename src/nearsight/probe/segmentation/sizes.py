"""How whole images are given to a model that may take one size only: for those there is `square`."""

from nearsight.probe.segmentation.config import SegmentConfig


def whole_size(size: tuple[int, int], config: SegmentConfig, step: int) -> tuple[int, int]:
    """(rows, columns) at which an image of these is tested: at the config's scale, each the nearest multiple of `step`.

    Squeezing by less than half a patch needs no padding, about which a model knows nothing.
    """
    if config.square:
        return config.crop, config.crop
    factor = min(config.longest / max(size), config.shortest / min(size))
    rows, columns = (max(step, round(side * factor / step) * step) for side in size)
    return rows, columns
