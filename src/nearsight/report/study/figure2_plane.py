"""Figure 2: every head in the plane of distance and entropy, by layer (S1, Figure 2)."""

from nearsight.report.figures import mad_entropy_plane
from nearsight.report.inputs import ModelHeads
from nearsight.report.study.conditions import base_and_full, num_seeds
from nearsight.report.study.drawing import Drawing, distances_from_zero
from nearsight.report.study.notes import add_footnote, beside_the_paper, scale_notes, seeds_in_words
from nearsight.study.results import StudyResults


def plane(results: StudyResults) -> Drawing:
    """All heads of all seeds of the base and the full protocol."""
    labels = base_and_full(results)
    models = [all_heads(results, label) for label in labels]
    figure = mad_entropy_plane(models)
    distances_from_zero(figure.axes[0], max(model.heads["mad"].max() for model in models))
    seeds = seeds_in_words(num_seeds(results, label) for label in labels)
    add_footnote(figure, [f"One point per head; the heads of {seeds}.", *scale_notes(results)])
    return Drawing(
        figure=figure,
        caption=f"Mean attention distance and entropy of every head of {' and '.join(labels)}; the colour is the "
        f"layer, the lower left corner is local and focused. The heads of {seeds} are shown."
        + beside_the_paper(results, "The paper's Figure 2 shows one seed."),
    )


def all_heads(results: StudyResults, condition: str) -> ModelHeads:
    """The heads of all seeds of a condition as those of one wide model: seed after seed."""
    runs = results.runs.loc[results.runs["condition"] == condition, "run"]
    places = {run: place for place, run in enumerate(runs)}
    heads = results.heads[results.heads["run"].isin(places)]
    place = heads["run"].map(places)
    wide = heads.assign(epoch=0, head=heads["head"] + place * (results.heads["head"].max() + 1))
    return ModelHeads(label=condition, heads=wide.iloc[place.argsort(kind="stable")])
