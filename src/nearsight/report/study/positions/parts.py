"""The claims, tables and figures of the image studies of S3, and what they add to those of S1."""

from collections.abc import Callable, Mapping, Sequence

from nearsight.report.study.drawing import Drawing
from nearsight.report.study.parts import StudyParts
from nearsight.report.study.positions import paper as s3
from nearsight.report.study.positions.association import association_table
from nearsight.report.study.positions.figure_association import association_and_distance
from nearsight.report.study.positions.figure_permuted import permutation_curves
from nearsight.report.study.positions.figure_positional import seeds_of_both
from nearsight.report.study.positions.permuted import permutation_table
from nearsight.report.study.positions.permuted_claims import permuted_claims
from nearsight.report.study.positions.positional import positional_claims, positional_table
from nearsight.report.study.positions.shuffling import POOLED
from nearsight.report.study.table import Table
from nearsight.study.results import StudyResults

ASSOCIATION_TABLES: Sequence[Callable[[StudyResults], Table]] = (association_table,)
ASSOCIATION_FIGURES: Mapping[str, Callable[[StudyResults], Drawing]] = {
    "position-association": association_and_distance
}
"""Of every study of CutMix or of S1's protocols."""

# Which parts of a protocol make heads local is not what these studies ask: they choose among networks.
_OF_PROTOCOLS = frozenset({"gain", "effects", "effects-by-layer", "separation", "dissociation", "correlation"})
# Of networks and tiles, "all factors on" is another network on other images; all four with heads are in Figure 5.
_OF_ENDS = frozenset({"figure-1-profiles", "figure-2-plane", "figure-3-heatmaps"})
# Of two conditions, it would be Figure 2 once more.
_OF_FOUR = frozenset({"figure-5-key-conditions"})

POSITION_PARTS: Mapping[str, StudyParts] = {
    "permuted-cifar100": StudyParts(
        paper=s3.PAPER,
        claims=permuted_claims(),
        intervals=POOLED,
        without=_OF_PROTOCOLS | _OF_ENDS,
        tables=(permutation_table,),
        figures={"permutation-curves": permutation_curves},
    ),
    **{
        name: StudyParts(
            paper=s3.PAPER,
            claims=positional_claims(name),
            without=_OF_PROTOCOLS | _OF_FOUR,
            tables=(positional_table,),
            figures={"positional-seeds": seeds_of_both},
        )
        for name in s3.PAIRS
    },
}
"""By the name of the study."""
