"""How training went."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from nearsight.errors import InputError
from nearsight.report.figures.style import add_legend, house_style, label_in_figure, light_grid, model_style
from nearsight.report.inputs import ModelHeads, check_labels

PANELS = {"train_loss": "training loss", "val_loss": "validation loss", "val_acc": "validation accuracy"}


def training_curves(models: Sequence[ModelHeads]) -> Figure:
    """Training loss, validation loss and validation accuracy over epochs, for the models that have a history."""
    check_labels(models)
    if all(model.history is None for model in models):
        raise InputError("no model has a training history, so there are no curves to draw")
    with house_style():
        figure = Figure(figsize=(8.4, 2.9), layout="constrained")
        panels = dict(zip(PANELS, figure.subplots(1, len(PANELS), sharex=True), strict=True))
        handles, labels = [], []
        for index, model in enumerate(models):
            if model.history is None:
                continue
            style = model_style(index)
            history = model.history.sort_values("epoch")
            for column, panel in panels.items():
                (line,) = panel.plot(
                    history["epoch"],
                    history[column],
                    color=style.colour,
                    linestyle=style.dash,
                    linewidth=1.5,
                    marker=style.marker,
                    markersize=4,
                    markevery=max(1, len(history) // 7),
                    gid=f"{column}-model{index}",
                )
            handles.append(
                Line2D([], [], color=line.get_color(), linestyle=style.dash, marker=style.marker, markersize=4)
            )
            labels.append(label_in_figure(model))
        for column, panel in panels.items():
            panel.set_title(PANELS[column])
            panel.set_xlabel("epoch")
            panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
            light_grid(panel)
        panels["val_acc"].yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
        add_legend(figure, handles, labels, loc="outside upper left", ncols=4)
    return figure
