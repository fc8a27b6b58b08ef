"""oelm claims as a user types it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from oelm.cli.main import app


pytest.importorskip("transformers", reason="BERT's arithmetic needs transformers")


def test_claims_as_text_json_and_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["claims", "--json"])
    assert done.exit_code == 0, done.output
    entries = json.loads(done.stdout)
    assert len(entries) >= 25
    text = CliRunner().invoke(app, ["claims"]).stdout
    assert "44,896,768" in text
    assert all(entry["said"] in text for entry in entries)
    assert CliRunner().invoke(app, ["claims", "--out", "a/claims.md"]).exit_code == 0
    assert "44,896,768" in (tmp_path / "a" / "claims.md").read_text()
