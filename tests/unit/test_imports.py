"""Structure that import-linter's contracts don't express: no cycle, and who may import AReaL."""

from __future__ import annotations

import sys

import grimp
import networkx
import pytest

AREAL_ALLOWED = (
    "areal_dta.bridge",
    "areal_dta.train_engine",
    "areal_dta.trainer",
    "areal_dta.replay",
    "areal_dta.rollout.worker",
    "experiments.",
)


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        "areal_dta",
        "launcher",
        "experiments",
        include_external_packages=True,
        exclude_type_checking_imports=True,
        cache_dir=None,
    )


def test_no_import_cycle(graph: grimp.ImportGraph) -> None:
    arrows = networkx.DiGraph((a, b) for a in graph.modules for b in graph.find_modules_directly_imported_by(a))
    cycles = [sorted(c) for c in networkx.strongly_connected_components(arrows) if len(c) > 1]
    assert not cycles


def test_only_the_bridge_side_imports_areal(graph: grimp.ImportGraph) -> None:
    importers = graph.find_modules_that_directly_import("areal")
    assert importers, "nothing imports areal: the check would pass vacuously"
    assert not [m for m in importers if not m.startswith(AREAL_ALLOWED)]


def test_the_tree_is_numpy_and_nothing_else(graph: grimp.ImportGraph) -> None:
    tree = graph.find_descendants("areal_dta.tree")
    assert tree
    imported = {name for module in tree for name in graph.find_modules_directly_imported_by(module)}
    assert {n for n in imported - tree if n.partition(".")[0] not in sys.stdlib_module_names} == {"numpy"}
