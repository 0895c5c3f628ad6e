"""The explorer as a notebook's widget: its module draws what the table keeps, in a page that is not ours."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nearsight import HeadTable, create_model, measure
from nearsight.data import make_shapes

pytestmark = pytest.mark.browser

_NOTEBOOK = """<!doctype html><meta charset="utf-8"><title>a notebook</title><style>{css}</style><div id="output"></div>
<script type="module">
const url = URL.createObjectURL(new Blob([{module}], {{ type: "text/javascript" }}));
const widget = (await import(url)).default;
const traits = {traits};
widget.render({{ model: {{ get: (name) => traits[name] }}, el: document.getElementById("output") }});
document.body.dataset.drawn = "yes";
</script>"""


def shown(widget: Any, ink: str = "rgb(1, 2, 3)") -> str:
    """What anywidget does with it, in one page."""
    module, traits = (json.dumps(value).replace("<", "\\u003c") for value in (str(widget._esm), {"data": widget.data}))
    return _NOTEBOOK.format(css=f"body {{ color: {ink} }} {widget._css}", module=module, traits=traits)


@pytest.fixture(scope="module")
def table() -> HeadTable:
    torch.manual_seed(0)
    model = create_model("compact_vit", depth=2, embed_dim=32, num_heads=4)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(20)
    images = make_shapes(3, image_size=32, split="test").images_NCHW / 127.5 - 1
    return measure(model, images, keep="maps", label="a ViT")


def test_it_draws_every_kept_head_and_the_weights_that_were_kept(visit: Callable[..., Any], table: HeadTable) -> None:
    pytest.importorskip("anywidget")
    visited = visit(shown(table.explore()))
    page = visited.page
    page.wait_for_selector("body[data-drawn=yes]")
    page.wait_for_function("document.querySelectorAll('#output canvas').length >= 2 * 4")
    text = page.inner_text("#output")
    assert "a ViT" in text
    for mad in table.mad.flat:
        assert f"{mad:.3f}" in text
    # Its letters have the notebook's colour, light or dark.
    assert page.evaluate("getComputedStyle(document.querySelector('.nsx')).color") == "rgb(1, 2, 3)"
    visited.requests[:] = [url for url in visited.requests if not url.startswith("blob:")]
