"""Figure 3: distance and entropy, layers × heads (S1, Figure 3)."""

from nearsight.report.figures import heatmaps
from nearsight.report.inputs import ModelHeads
from nearsight.report.study.conditions import base_and_full, num_seeds
from nearsight.report.study.drawing import Drawing
from nearsight.report.study.notes import add_footnote, beside_the_paper, scale_notes, seeds_in_words
from nearsight.study.results import StudyResults
from nearsight.study.statistics import sorted_heads


def maps(results: StudyResults) -> Drawing:
    """The base on the left, the full protocol on the right, as in the paper.

    With one seed a column is a head. Heads of different seeds have nothing to do with each other, so with several a
    column is a rank by distance and a cell the mean over seeds.
    """
    labels = base_and_full(results)[::-1]
    one_seed = max(num_seeds(results, label) for label in labels) == 1
    figure = heatmaps([_one_model(results, label, by_rank=not one_seed) for label in labels])
    seeds = seeds_in_words(num_seeds(results, label) for label in labels)
    words = (
        "1 seed, its heads in their own order."
        if one_seed
        else f"Each cell: mean over {seeds}. Each layer's heads are sorted by their distance, also in the lower row."
    )
    if not one_seed:
        for axes in figure.axes:
            if axes.get_xlabel():
                axes.set_xlabel("head, by distance")
    add_footnote(figure, [words, *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption=f"Mean attention distance (top) and entropy (bottom) of every head of {' and '.join(labels)}, on one "
        f"scale per row. {words}" + beside_the_paper(results, "The paper's Figure 3 shows one seed."),
    )


def _one_model(results: StudyResults, condition: str, *, by_rank: bool) -> ModelHeads:
    runs = results.runs.loc[results.runs["condition"] == condition, "run"]
    heads = results.heads[results.heads["run"].isin(runs)]
    if by_rank:
        ranked = sorted_heads(heads, "mad")
        numbers = ["mad", "mad_std", "entropy", "entropy_std", "num_images"]
        groups = ranked.groupby(["layer", "rank"])
        heads = groups.agg({"layer_name": "first", **dict.fromkeys(numbers, "mean")}).reset_index()
        heads = heads.rename(columns={"rank": "head"}).round({"num_images": 0})
    return ModelHeads(label=condition, heads=heads.assign(epoch=0))
