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
    words = ["report", "--all", "--format", "html", "--readme", "README.md"]
    assert CliRunner().invoke(app, words).exit_code != 0  # there is none
    (tmp_path / "README.md").write_text("above\n<!-- results:begin -->\nold\n<!-- results:end -->\nbelow\n")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == ["README.md", "reports/mine.html", "reports/index.html", "reports/final.html"]
    told = (tmp_path / "README.md").read_text()
    assert told.startswith("above\n<!-- results:begin -->\n| study |")
    assert told.endswith("<!-- results:end -->\nbelow\n")
    assert "old" not in told
    assert "| mine | " in told
    assert 'href="mine.html"' in (tmp_path / "reports" / "index.html").read_text()
