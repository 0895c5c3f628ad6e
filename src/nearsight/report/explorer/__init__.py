"""The attention explorer: click a patch of a picture, and every head of a model shows where that patch looks.

In a page, `Explorer.html()` is the place and the data, `explorer_style()` and `explorer_script()` come with it.
Anywhere else, the script defines `nearsightExplorer.mount(element, data)`, which draws `Explorer.data` (JSON values)
into an element and returns `{ready, select, shown, miniature}`; `explorer_module()` is that as a module for anywidget:

    class Widget(anywidget.AnyWidget):
        _esm, _css = explorer_module(), explorer_style()
        data = traitlets.Dict().tag(sync=True)

    Widget(data=dict(explore([KeptMaps(heads=…, layers=attention_maps(model, images), pictures_BHWC=…)]).data))
"""

from typing import TYPE_CHECKING

from nearsight.lazy import open_room

if TYPE_CHECKING:
    from nearsight.report.explorer.explorer import (
        Exhibit,
        Explorer,
        KeptMaps,
        explore,
        explorer_module,
        explorer_script,
        explorer_style,
    )

__all__ = ["Exhibit", "Explorer", "KeptMaps", "explore", "explorer_module", "explorer_script", "explorer_style"]

open_room(__name__)
