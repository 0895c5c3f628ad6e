"""Where a study's name finds its claims, tables and figures.

A family of studies has a module with a mapping of study names to `StudyParts`; it is one line here.
"""

from collections.abc import Mapping

from nearsight.report.study.claims import ABLATIONS, CLAIMS
from nearsight.report.study.locat.parts import LOCAT_PARTS
from nearsight.report.study.open_questions import OPEN_QUESTIONS
from nearsight.report.study.own_patch.figure import every_head
from nearsight.report.study.own_patch.questions import own_patch_questions
from nearsight.report.study.own_patch.table import own_patch_table
from nearsight.report.study.paper import PAPER
from nearsight.report.study.parts import StudyParts
from nearsight.report.study.positions.parts import ASSOCIATION_FIGURES, ASSOCIATION_TABLES, POSITION_PARTS
from nearsight.report.study.training_length import LENGTH_CLAIMS, length_and_distance, length_table

PARTS: Mapping[str, StudyParts] = {
    **{
        name: StudyParts(paper=PAPER, claims=claims, tables=ASSOCIATION_TABLES, figures=ASSOCIATION_FIGURES)
        for name, claims in CLAIMS.items()
    },
    # Those with runs enough to ask beside what the paper says.
    **{
        name: StudyParts(
            paper=PAPER,
            claims=(*CLAIMS[name], *LENGTH_CLAIMS, *own_patch_questions(colour)),
            tables=(length_table, own_patch_table, *ASSOCIATION_TABLES),
            figures={"training-length": length_and_distance, "own-patch": every_head, **ASSOCIATION_FIGURES},
        )
        for name, colour in ABLATIONS.items()
    },
    **OPEN_QUESTIONS,
    **LOCAT_PARTS,
    **POSITION_PARTS,
}
"""By the name of the study."""


def parts_of(study: str) -> StudyParts:
    """Those of a study by its name; none where it has none of its own."""
    return PARTS.get(study, StudyParts())
