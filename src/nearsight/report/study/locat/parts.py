"""The claims, questions, tables and figures of the LocAt studies."""

from collections.abc import Mapping

from nearsight.report.study.claim import Claim
from nearsight.report.study.locat import paper as s2
from nearsight.report.study.locat.claims import core_claims, variant_claims
from nearsight.report.study.locat.claims_of_layers import layer_claims
from nearsight.report.study.locat.cutmix import cutmix_questions
from nearsight.report.study.locat.cutmix_table import cutmix_table
from nearsight.report.study.locat.figure_accuracy import accuracy_and_locality
from nearsight.report.study.locat.figure_interaction import interaction
from nearsight.report.study.locat.figure_layers import layer_profiles
from nearsight.report.study.locat.tables import differences_to, layers_table, locality_table
from nearsight.report.study.parts import StudyParts

# With CutMix and LocAt as whole, the conditions' names would say of LocAt alone what it lacks.
_CUTMIX_AND_LOCAT = {
    "Baseline": "neither",
    "+CutMix": "CutMix",
    "−CutMix": "LocAt",
    "CutMix + LocAt": "CutMix and LocAt",
}


def _of_variants(*claims: Claim) -> StudyParts:
    return StudyParts(
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


LOCAT_PARTS: Mapping[str, StudyParts] = {
    "locat-cifar100": _of_variants(*core_claims(s2.TABLE_3_CIFAR100), *variant_claims(), *layer_claims()),
    "locat-tiny-imagenet": _of_variants(*core_claims(s2.TABLE_3_MINI_IMAGENET), *layer_claims()),
    "locat-cutmix-cifar100": StudyParts(
        claims=cutmix_questions(),
        tables=(locality_table, layers_table, differences_to("Baseline"), cutmix_table),
        figures={"figure-6-interaction": interaction, "figure-7-layers": layer_profiles(_CUTMIX_AND_LOCAT)},
    ),
}
"""By the name of the study."""
