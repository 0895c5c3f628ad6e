"""All tables of a study."""

import dataclasses

from nearsight.report.study.notes import assumed_notes, scale_notes
from nearsight.report.study.table import Table
from nearsight.report.study.tables_conditions import conditions_table, gain_table
from nearsight.report.study.tables_effects import effects_tables, factors_of_many_levels
from nearsight.report.study.tables_groups import dissociation_tables, separation_table
from nearsight.study.results import StudyResults


def study_tables(results: StudyResults) -> list[Table]:
    """What can be said with the runs there are; under every table its scale and what was assumed."""
    gain, conditions = gain_table(results), conditions_table(results)
    for name in factors_of_many_levels(results):
        why = f"No table of effects: they are fitted for factors of two levels, and {name} has another number of them."
        conditions = dataclasses.replace(conditions, notes=(*conditions.notes, why))
    tables = [conditions, gain, *effects_tables(results), separation_table(results), *dissociation_tables(results)]
    return [
        dataclasses.replace(table, notes=(*scale_notes(results), *table.notes, *assumed_notes(results)))
        for table in tables
        if table is not None
    ]
