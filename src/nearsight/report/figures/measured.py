"""The picture of a further measurement, as it says that it is drawn."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from nearsight.lens import HeadTable, Measurement
from nearsight.report.figures.heat import head_heatmaps
from nearsight.report.figures.offsets import offset_pictures


def draw_measurement(kind: type[Measurement], table: HeadTable, *, label: str, layers: Sequence[int]) -> Figure | None:
    """None where it has no picture; `layers` are the numbers that the table's layers have in the whole model."""
    picture = kind.picture
    if picture is None:
        return None
    if picture == "heat":
        return head_heatmaps(table, kind.columns, label=label, layers=layers)
    if picture == "steps":
        return offset_pictures(table, label=label, layers=layers)
    assert callable(picture), f"{kind.__name__} has a picture of an unknown kind, {picture!r}"
    drawn = picture(table, label=label, layers=layers)
    assert isinstance(drawn, Figure)
    return drawn
