"""The command line: help, tables, exit codes."""

import pytest
from typer.testing import CliRunner

from affine_attn.cli import app
from affine_attn.core.variants import VARIANTS, variants_table

runner = CliRunner()


def test_help_lists_the_commands():
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("demo", "variants", "bench", "convert", "generate", "prepare", "eval", "eval-score", "report"):
        assert command in result.output


def test_variants_prints_the_table():
    result = runner.invoke(app, ["variants"])
    assert result.exit_code == 0
    assert variants_table() in result.output


@pytest.mark.parametrize("arguments", [["nonsense"], ["demo", "--nonsense"]])
def test_a_wrong_argument_is_an_error_of_one_screen(arguments):
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "nonsense" in result.output


def test_a_check_names_an_engine_and_an_error_for_every_variant(monkeypatch):
    from affine_attn import check

    # Timing says nothing in a test; the rest of the table is real.
    monkeypatch.setattr(check, "_time_over_plain", lambda inputs, device: 1.0)
    result = runner.invoke(app, ["variants", "--check"])
    assert result.exit_code == 0, result.output
    for name in VARIANTS:
        assert name in result.output
    assert "FlexAttention has no backward on the CPU" in " ".join(result.output.split())
