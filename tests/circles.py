"""A contract for import-linter: no circle of imports between files, those inside functions counted.

Its own `acyclic_siblings` counts a folder as one, and so finds circles between folders whose files have none.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output
from importlinter.application.contract_utils import AlertLevel, remove_ignored_imports


class NoCircles(Contract):
    """`ignore_imports`: known ones, "a -> b" each."""

    ignore_imports = fields.SetField(subfield=fields.ImportExpressionField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        warnings = remove_ignored_imports(graph, self.ignore_imports, AlertLevel.WARN)
        imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
        circles = []
        while circle := _circle(imports):
            circles.append(circle)
            imports[circle[1]] -= {circle[0]}  # the next one is found without
        return ContractCheck(kept=not circles, warnings=warnings, metadata={"circles": circles})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for circle in check.metadata["circles"]:
            output.print_error(" <- ".join(circle))


def _circle(imports: dict[str, set[str]]) -> list[str] | None:
    """Modules each of which is imported by the next, the first and last the same; None without a circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as found:
        return found.args[1]
    return None
