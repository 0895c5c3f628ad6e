"""The attention explorer: click a patch of a picture, and every head of a model shows where that patch looks."""

from typing import TYPE_CHECKING

from nearsight.lazy import open_room

if TYPE_CHECKING:
    from nearsight.report.explorer.explorer import Exhibit, Explorer, explore, explorer_script, explorer_style

__all__ = ["Exhibit", "Explorer", "explore", "explorer_script", "explorer_style"]

open_room(__name__)
