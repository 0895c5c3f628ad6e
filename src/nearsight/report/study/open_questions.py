"""What the protocol study left open (S1 §7): the parts of the studies that ask."""

from collections.abc import Mapping

from nearsight.report.study.emergence.figures import layers_by_epoch, layers_over_epochs, over_epochs
from nearsight.report.study.emergence.film import heads_in_motion
from nearsight.report.study.emergence.questions import EMERGENCE_QUESTIONS, INTERVALS
from nearsight.report.study.emergence.tables import course_table
from nearsight.report.study.mixing.contrasts import MIXING_QUESTIONS, contrast_table
from nearsight.report.study.mixing.figure import contrasts
from nearsight.report.study.mixing.long import LONG_QUESTIONS, long_contrast_table, long_contrasts
from nearsight.report.study.parts import StudyParts
from nearsight.report.study.size.figure import distance_by_size
from nearsight.report.study.size.fit import SIZE_QUESTIONS, size_table
from nearsight.report.study.unreported.effects import UNREPORTED_QUESTIONS, settings_table
from nearsight.report.study.unreported.figures import settings_beside_the_paper, settings_effects
from nearsight.report.study.unreported.fit import fit_table

_EMERGENCE = StudyParts(
    claims=EMERGENCE_QUESTIONS,
    intervals=INTERVALS,
    tables=(course_table,),
    figures={
        "emergence-course": over_epochs,
        "emergence-layers": layers_over_epochs,
        "emergence-layers-by-epoch": layers_by_epoch,
    },
    animations={"emergence-heads": heads_in_motion},
)

OPEN_QUESTIONS: Mapping[str, StudyParts] = {
    "unreported-cifar100": StudyParts(
        claims=UNREPORTED_QUESTIONS,
        tables=(fit_table, settings_table),
        figures={"settings-beside-the-paper": settings_beside_the_paper, "settings-effects": settings_effects},
    ),
    "mixing-cifar100": StudyParts(
        claims=MIXING_QUESTIONS, tables=(contrast_table,), figures={"mixing-contrasts": contrasts}
    ),
    "mixing-long-cifar100": StudyParts(
        claims=LONG_QUESTIONS, tables=(long_contrast_table,), figures={"mixing-contrasts": long_contrasts}
    ),
    "emergence-cifar100": _EMERGENCE,
    "emergence-fitted-cifar100": _EMERGENCE,
    "size-cifar100": StudyParts(
        claims=SIZE_QUESTIONS, tables=(size_table,), figures={"distance-by-size": distance_by_size}
    ),
}
"""By the name of the study."""
