"""The claims, questions, tables and figures of the LocAt studies."""

from nearsight.papers.locat import numbers as s2
from nearsight.papers.locat.accuracy import (
    core_claims,
    differences_to,
    layer_claims,
    layers_table,
    locality_table,
    variant_claims,
)
from nearsight.papers.locat.cutmix import cutmix_questions, cutmix_table, interaction
from nearsight.papers.locat.figures import accuracy_and_locality, layer_profiles
from nearsight.report.claims import Claim
from nearsight.report.studies import report_on

# With CutMix and LocAt as whole, the conditions' names would say of LocAt alone what it lacks.
_CUTMIX_AND_LOCAT = {
    "Baseline": "neither",
    "+CutMix": "CutMix",
    "−CutMix": "LocAt",
    "CutMix + LocAt": "CutMix and LocAt",
}


def _report_on_variants(study: str, *claims: Claim) -> None:
    report_on(
        study,
        paper=s2.PAPER,
        claims=claims,
        tables=(
            locality_table,
            layers_table,
            differences_to(s2.VIT),
            differences_to(s2.LOCAT, of=s2.OTHER_LOCATS),
        ),
        figures={
            "figure-6-accuracy-and-locality": accuracy_and_locality,
            "figure-7-layers": layer_profiles({label: label for label in s2.CORE}),
        },
    )


_report_on_variants("locat-cifar100", *core_claims(s2.TABLE_3_CIFAR100), *variant_claims(), *layer_claims())
_report_on_variants("locat-tiny-imagenet", *core_claims(s2.TABLE_3_MINI_IMAGENET), *layer_claims())
report_on(
    "locat-cutmix-cifar100",
    claims=cutmix_questions(),
    tables=(locality_table, layers_table, differences_to("Baseline"), cutmix_table),
    figures={"figure-6-interaction": interaction, "figure-7-layers": layer_profiles(_CUTMIX_AND_LOCAT)},
)
