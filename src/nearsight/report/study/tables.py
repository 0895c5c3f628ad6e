"""All tables of a study."""

import dataclasses
from contextlib import suppress

from nearsight.errors import InputError
from nearsight.report.study.conditions import with_attention
from nearsight.report.study.notes import assumed_notes, scale_notes
from nearsight.report.study.registry import parts_of
from nearsight.report.study.table import Table
from nearsight.report.study.tables_conditions import conditions_table, gain_table
from nearsight.report.study.tables_effects import effects_tables, factors_of_many_levels
from nearsight.report.study.tables_groups import dissociation_tables, separation_table
from nearsight.study.results import StudyResults


def study_tables(results: StudyResults) -> list[Table]:
    """What can be said with the runs there are; under every table its scale and what was assumed."""
    conditions, own = conditions_table(results), parts_of(results.name)
    if "effects" not in own.without and (many := factors_of_many_levels(with_attention(results))):
        why = f"No table of effects: they are fitted for factors of two levels, not for {', '.join(many)}."
        conditions = dataclasses.replace(conditions, notes=(*conditions.notes, why))
    tables = [conditions, gain_table(results), *_of_locality(results)]
    for make in own.tables:
        with suppress(InputError):  # the runs there are cannot give it
            tables.append(make(results))
    return [
        dataclasses.replace(table, notes=(*scale_notes(results), *table.notes, *assumed_notes(results)))
        for table in tables
        if table is not None and table.name not in own.without
    ]


def _of_locality(results: StudyResults) -> list[Table]:
    measured = with_attention(results)
    if measured.runs.empty:
        return []
    separated = separation_table(measured)
    tables = [*effects_tables(measured), *([separated] if separated else []), *dissociation_tables(measured)]
    left_out = len(results.runs) - len(measured.runs)
    notes = (f"Without {left_out} runs whose heads could not be measured.",) if left_out else ()
    return [dataclasses.replace(table, notes=(*table.notes, *notes)) for table in tables]
