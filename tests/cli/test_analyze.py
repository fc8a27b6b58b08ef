"""oelm analyze and oelm report as a user types them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner


sys.path.insert(0, str(Path(__file__).parent))

from evidence_runs import made_study

from oelm.cli.main import app
from oelm.errors import DataError


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_study(tmp_path)
    return tmp_path


def invoke(*words):
    return CliRunner().invoke(app, list(words))


def test_analyze_writes_the_csv_and_says_the_verdict(here):
    done = invoke("analyze", "mine.toml")
    assert done.exit_code == 0, done.output
    assert "worse" in done.stdout
    assert sorted(path.name for path in (here / "results").iterdir()) == [
        "mine.csv",
        "mine.curves.csv",
        "mine.sha256",
    ]


def test_analyze_json_is_one_document_with_the_numbers(here):
    done = invoke("analyze", "mine.toml", "--json")
    (said,) = json.loads(done.stdout)
    (comparison,) = said["comparisons"]
    assert comparison["verdict"] == "worse"
    assert comparison["estimate"]["n"] == 6
    assert comparison["estimate"]["p"] == 2 / 2**6
    assert said["runs"] == {"done": 12}


def test_analyze_without_runs_or_studies_is_an_error(here):
    done = invoke("analyze", "mine.toml", "--runs", "elsewhere")
    assert isinstance(done.exception, DataError)
    assert "run it first" in str(done.exception)
    assert invoke("analyze").exit_code == 2


def test_report_renders_from_results_and_refuses_an_edited_file(here):
    assert invoke("analyze", "mine.toml").exit_code == 0
    done = invoke("report", "mine.toml", "--format", "html", "--format", "md")
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == ["reports/mine.html", "reports/mine.md"]
    table = here / "results" / "mine.csv"
    table.write_text(table.read_text().replace("3.0", "2.0", 1))
    refused = invoke("report", "mine.toml")
    assert isinstance(refused.exception, DataError)
    assert "edited" in str(refused.exception)


def test_report_without_results_names_the_command(here):
    done = invoke("report", "mine.toml")
    assert isinstance(done.exception, DataError)
    assert "oelm analyze" in str(done.exception)
    assert invoke("report").exit_code == 2
