"""oelm report --all: every study with results, the index and the final report."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner


sys.path.insert(0, str(Path(__file__).parent))

from evidence_runs import made_study

from oelm.cli.main import app


@pytest.mark.slow
def test_report_all_writes_index_and_final(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "studies").mkdir()
    made_study(tmp_path)
    (tmp_path / "mine.toml").rename(tmp_path / "studies" / "mine.toml")
    assert CliRunner().invoke(app, ["analyze", "--all"]).exit_code == 0
    done = CliRunner().invoke(app, ["report", "--all", "--format", "html"])
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == ["reports/mine.html", "reports/index.html", "reports/final.html"]
    assert 'href="mine.html"' in (tmp_path / "reports" / "index.html").read_text()
