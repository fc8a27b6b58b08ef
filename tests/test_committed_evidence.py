"""What is committed under reports/ is what the program renders from results/, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
RESULTS = sorted((ROOT / "results").glob("*.csv"))


@pytest.mark.slow
@pytest.mark.skipif(not RESULTS, reason="no results are committed yet")
def test_reports_are_rendered_from_results(tmp_path):
    from oelm.evidence import final
    from oelm.study.rows import studies_here

    final.render_all(ROOT / "results", tmp_path, ["html", "md", "tex"], studies_here())
    rendered = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    there = [path for path in (ROOT / "reports").rglob("*") if path.is_file() and path.suffix != ".pdf"]
    committed = {path.relative_to(ROOT / "reports") for path in there}
    assert rendered == committed
    for name in rendered:
        assert (tmp_path / name).read_bytes() == (ROOT / "reports" / name).read_bytes(), name
