"""Deviations and strengths of LocAt's Gaussians against all numbers at once."""

import numpy as np
import pytest
import timm
import torch

from nearsight.errors import InputError
from nearsight.lens.widths import ALPHA, COLUMNS, PERCENTILES, ROWS, gaussian_widths
from nearsight.locat import add_locat
from nearsight.locat.gaussian import GaussianHeads
from nearsight.models import create_model
from nearsight.report.figures.widths import widths_figure


def strong(model: torch.nn.Module) -> torch.nn.Module:
    """Heads that differ, as after training."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, GaussianHeads):
            for head in (module.log_var, module.log_alpha):
                if head is not None:
                    torch.nn.init.normal_(head.weight, std=1.0)
    return model.eval()


def small_swin() -> torch.nn.Module:
    options = {"img_size": 32, "window_size": 4, "embed_dim": 12, "depths": (1, 1), "num_heads": (1, 2)}
    return add_locat(timm.create_model("swin_tiny_patch4_window7_224", **options))


@pytest.mark.parametrize("kind", ["vit", "fixed", "swin"])
def test_statistics_are_those_of_all_numbers(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "swin":
        model = strong(small_swin())
    else:
        width = 1.5 if kind == "fixed" else "query"
        model = strong(add_locat(create_model("compact_vit", depth=2, embed_dim=24, num_heads=3), width=width))
    images = torch.randn(5, 3, 32, 32)
    seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    names = {module: name for name, module in model.named_modules() if isinstance(module, GaussianHeads)}
    hooks = [
        module.register_forward_hook(lambda heads, _, made: seen.setdefault(names[heads], []).append(made))
        for module in names
    ]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    widths = gaussian_widths(model, images, batch_size=2)
    assert widths.num_images == 5
    assert list(widths.frame["layer_name"].unique()) == [name.removesuffix(".gaug") for name in seen]
    for layer, name in enumerate(seen):
        ((variance, alpha),) = seen[name]
        expected = {ROWS: variance[..., 0].sqrt(), COLUMNS: variance[..., 1].sqrt(), ALPHA: alpha}
        for what, numbers in expected.items():
            (row,) = widths.frame[(widths.frame["layer"] == layer) & (widths.frame["what"] == what)].to_dict("records")
            values = numbers.double().flatten().numpy()
            assert row["mean"] == pytest.approx(values.mean(), rel=1e-5)
            assert row["std"] == pytest.approx(values.std(), rel=1e-3, abs=1e-6)
            for percentile in PERCENTILES:
                near = np.percentile(values, percentile, method="inverted_cdf")
                assert row[f"p{percentile}"] == pytest.approx(near, rel=2e-3)
            grid = 4 if kind == "swin" else 8
            assert np.isnan(row["largest"]) if what == ALPHA else row["largest"] == pytest.approx(grid)
            assert what == ALPHA or row["p99"] <= row["largest"] * 1.002
    assert not model._forward_hooks
    figure = widths_figure(widths.frame, label="small")
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "σ along rows (patches)",
        "σ along columns (patches)",
        "α",
    ]
    drawn = figure.axes[2].lines[0].get_ydata()
    np.testing.assert_allclose(drawn, widths.frame.loc[widths.frame["what"] == ALPHA, "mean"])


def test_models_without_gaussians_and_without_images() -> None:
    plain = create_model("compact_vit", depth=1)
    with pytest.raises(InputError, match="has no Gaussian-augmented attention"):
        gaussian_widths(plain, torch.zeros(1, 3, 32, 32))
    with pytest.raises(InputError, match="no images"):
        gaussian_widths(add_locat(plain), [])
