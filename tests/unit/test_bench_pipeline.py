"""`bench.py pipeline` on a small workload: running ahead idles less than the alternatives it is compared with."""

from __future__ import annotations

import argparse

import pytest

from scripts.benchlib import pipeline
from scripts.benchlib.report import UsageError


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    pipeline.add_arguments(parser)
    return parser.parse_args(given)


def test_the_engine_s_order_idles_least_and_program_order_most() -> None:
    result = pipeline.run(arguments("--scale-turns", "1", "--max-block-tokens", "256"))
    for stages in ("2", "4"):
        idle = {name: order["idle_share"] for name, order in result["stages"][stages].items()}
        assert idle["engine"] < idle["forwards_ahead"] < idle["program_order"]


def test_stages_that_do_not_divide_the_layers_are_refused() -> None:
    with pytest.raises(UsageError, match="5 does not divide 36"):
        pipeline.run(arguments("--scale-turns", "0.2", "--stages", "5"))


@pytest.mark.parametrize("option", [("--max-block-tokens", "0"), ("--seed", "-1"), ("--scale-turns", "0")])
def test_impossible_values_are_refused_by_the_name_of_the_option(option: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match=" ".join(option)):
        pipeline.run(arguments(*option))


@pytest.mark.parametrize(
    ("option", "part"), [(("--scale-turns", "nan"), "no finite number"), (("--stages", "2,x"), "no list of whole")]
)
def test_what_is_no_number_is_refused_without_names_of_functions(
    option: tuple[str, str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(*option)
    said = capsys.readouterr().err
    assert part in said and "value: " not in said
