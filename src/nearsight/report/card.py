"""The card of a shared model: what it is, its numbers, how it is loaded and trained again; all of it from its files."""

from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.repocard_data import EvalResult
from torch import nn

from nearsight.data.loading import dataset_spec
from nearsight.report.differences import existing_heads, most_local_head
from nearsight.report.inputs import ModelHeads
from nearsight.report.reading import own_patch_heads
from nearsight.report.tables import markdown_rows
from nearsight.tensorfile import load_tensors
from nearsight.train import RunFolder
from nearsight.train.integrity import OWN_IMAGES
from nearsight.train.recipes import command_of

_CERTIFIED = ("seed", "identity", "commit", "versions", "hardware", "wall_seconds")


def model_card(
    data: ModelCardData,
    name: str,
    place: str,
    *,
    model: nn.Module,
    run: RunFolder | None,
    heads: ModelHeads | None,
    by_timm: bool,
) -> str:
    """A README.md with the front matter that the Hub reads.

    Args:
        data: tags, licence and the like; what is known of data set and accuracy is added.
        place: what names the model, `hf-hub:org/name` or `local-dir:FOLDER`.
        run: where it was trained; None where that is not known.
        heads: what was measured of it.
        by_timm: whether timm can load it.
    """
    trained_on = None if run is None else run.read_config().data.name
    if trained_on is not None and trained_on != OWN_IMAGES and dataset_spec(trained_on).find is not None:
        data.datasets = [trained_on]
    accuracy = None if run is None else run.read_result().get("test_acc")
    if accuracy is not None:
        data.metrics, data.model_name = ["accuracy"], name
        data.eval_results = [_evaluated(str(trained_on), accuracy)]
    images = f" --images {trained_on}" if data.datasets else ""
    lines = [
        *(f"# {name}", "", _described(model, run, trained_on), ""),
        *_numbers(accuracy, heads),
        *("## Load it", "", "```python", *_loading(place, by_timm), "```", ""),
        *(("```sh", f"nearsight measure {place}{images}", "```", "") if by_timm else ()),
        *(() if run is None else _how_trained(run)),
        *(() if heads is None else ("`heads.csv` has every head, `report.html` is their page.",)),
    ]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines).rstrip() + "\n"


def _evaluated(data: str, accuracy: float) -> EvalResult:
    return EvalResult(
        task_type="image-classification",
        dataset_type=data,
        dataset_name=data,
        dataset_split="test",
        metric_type="accuracy",
        metric_value=round(accuracy, 6),
    )


def _described(model: nn.Module, run: RunFolder | None, trained_on: str | None) -> str:
    described: Any = getattr(model, "pretrained_cfg", None) or {}
    architecture = described.get("architecture") or type(model).__name__
    words = f"`{architecture}` with {sum(weight.numel() for weight in model.parameters()):,} weights"
    if run is None:
        return f"{words}."
    kinds = {str(weight.dtype).removeprefix("torch.") for weight in load_tensors(run.model)[0].values()}
    words += f", trained on {trained_on}."
    if kinds != {"float32"}:
        words += f" Weights are stored as {', '.join(sorted(kinds))}; the numbers are those of the run."
    return words


def _numbers(accuracy: float | None, heads: ModelHeads | None) -> list[str]:
    pairs = {} if accuracy is None else {"test accuracy": f"{100 * accuracy:.2f} %"}
    if heads is None:
        return [*_pairs(pairs), ""] if pairs else []
    rows, local, own = existing_heads(heads), most_local_head(heads), own_patch_heads(heads)
    places = "; ".join(f"layer {row['layer']}, head {row['head']}" for _, row in own.iterrows())
    pairs["most local head"] = f"layer {local.layer}, head {local.head}: MAD {local.mean:.4f}"
    pairs["own-patch heads"] = f"{len(own)} of {len(rows)}" + (f" ({places})" if places else "")
    if local.uniform is not None:
        pairs["MAD of uniform attention"] = f"{local.uniform:.3f}"
    pairs["measured on"] = f"{local.num_images:,} images"
    layers = [
        {
            "layer": layer,
            **{f"{what} MAD": f"{group['mad'].agg(what):.3f}" for what in ("min", "mean")},
            **{f"{what} entropy": f"{group['entropy'].agg(what):.3f}" for what in ("min", "mean")},
        }
        for layer, group in rows.groupby("layer")
    ]
    return [
        *(*_pairs(pairs), ""),
        "MAD is the mean attention distance of a head, as a share of the image's diagonal; entropy is 1 for uniform",
        "attention. An own-patch head spends more attention on the query's own patch than on all others together.",
        *("Layers and heads count from 0.", "", *markdown_rows(layers), ""),
    ]


def _loading(place: str, by_timm: bool) -> Sequence[str]:
    if by_timm:
        load = f'model = timm.create_model("{place}", pretrained=True)'
        return "import nearsight  # which registers its models with timm", "import timm", "", load
    return "from nearsight import HubModel", "", f'model = HubModel.from_pretrained("{place.partition(":")[2]}").model'


def _how_trained(run: RunFolder) -> list[str]:
    result, certificate = run.read_result(), run.read_provenance()
    lines = ["## How it was trained", ""]
    if result.keys() >= {"epochs", "best_epoch"}:
        lines += [f"{result['epochs']} epochs; the weights are those of epoch {result['best_epoch']}.", ""]
    command = None if run.is_pretraining else command_of(run.read_config())
    if command is None:
        lines += ["`config.json` has all settings.", ""]
    else:
        lines += ["```sh", command, "```", "", "Trained again, a seed gives other weights by rounding.", ""]
    kept = {name.replace("_", " "): certificate[name] for name in _CERTIFIED if certificate.get(name) is not None}
    return [*lines, *_pairs({name: _in_words(value) for name, value in kept.items()}), ""] if kept else lines


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_in_words(each)}" for name, each in value.items())
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def _pairs(pairs: Mapping[str, str]) -> list[str]:
    return markdown_rows([{"": name, "value": value} for name, value in pairs.items()])
