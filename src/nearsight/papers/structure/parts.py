"""The claims, tables and figures of the image studies of S3, and what they add to those of S1."""

from nearsight.papers.structure import numbers as s3
from nearsight.papers.structure.permuted import POOLED, permutation_curves, permutation_table, permuted_claims
from nearsight.papers.structure.positional import positional_claims, positional_table, seeds_of_both
from nearsight.report.studies import report_on

# Which parts of a protocol make heads local is not what these studies ask: they choose among networks.
_OF_PROTOCOLS = frozenset({"gain", "effects", "effects-by-layer", "separation", "dissociation", "correlation"})
# Of networks and tiles, "all factors on" is another network on other images; all four with heads are in Figure 5.
_OF_ENDS = frozenset({"figure-1-profiles", "figure-2-plane", "figure-3-heatmaps"})
# Of two conditions, it would be Figure 2 once more.
_OF_FOUR = frozenset({"figure-5-key-conditions"})

report_on(
    "permuted-cifar100",
    paper=s3.PAPER,
    claims=permuted_claims(),
    intervals=POOLED,
    without=_OF_PROTOCOLS | _OF_ENDS,
    tables=(permutation_table,),
    figures={"permutation-curves": permutation_curves},
)
for _name in s3.PAIRS:
    report_on(
        _name,
        paper=s3.PAPER,
        claims=positional_claims(_name),
        without=_OF_PROTOCOLS | _OF_FOUR,
        tables=(positional_table,),
        figures={"positional-seeds": seeds_of_both},
    )
