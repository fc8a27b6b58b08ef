"""What is committed under reports/ is what the program renders from results/, byte for byte."""

from __future__ import annotations

import tarfile
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


@pytest.mark.skipif(not RESULTS, reason="no results are committed yet")
def test_the_table_in_the_readme_is_made_from_results(tmp_path):
    from oelm.evidence import final
    from oelm.study.rows import studies_here

    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    final.render_all(ROOT / "results", tmp_path, ["md"], studies_here(), readme=tmp_path / "README.md")
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()


@pytest.mark.skipif(not RESULTS, reason="no results are committed yet")
def test_committed_records_give_the_committed_results(tmp_path):
    """Whoever unpacks the records and collects them gets the tables that the reports were rendered from."""
    from oelm.evidence import results
    from oelm.study.rows import load_study, studies_here

    for table in sorted((ROOT / "results").glob("*.sha256")):
        study = load_study(studies_here()[table.stem])
        with tarfile.open(ROOT / "results" / f"{study.name}.runs.tar.gz") as packed:
            packed.extractall(tmp_path, filter="data")
        results.write(results.collect(study, tmp_path), tmp_path / "results")
        for made in sorted((tmp_path / "results").glob(f"{study.name}.*")):
            assert made.read_bytes() == (ROOT / "results" / made.name).read_bytes(), made.name
