"""Reports: the same bytes twice, nothing injected, nothing fetched; opened in a real browser."""

from __future__ import annotations

import shutil
from html.parser import HTMLParser

import pytest
from records import lm_study, record, run_study, save

from oelm.errors import ConfigError, DataError, MachineError
from oelm.evidence import final, report, results
from oelm.study.rows import expand


PAYLOADS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><svg onload=alert(1)>",
    "{{7*7}}{% raw %}",
    "$x^2$ \\input{/etc/passwd} %",
    "| [a](javascript:alert(1)) | `x` |",
    "=cmd|' /C calc'!A0",
    "\x1b]0;x\x07‮",
]


class Elements(HTMLParser):
    """Which elements and attributes a page has, but for the SVG that matplotlib draws."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, tuple(sorted(name for name, _ in attrs))))

    @property
    def kinds(self):
        return set(self.found)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    study = lm_study(arms=("baseline", "oelm-freeze"), seeds=[100, 101, 102, 103])
    run_study(study, root, effect={"oelm-freeze": 0.1})
    return study, results.collect(study, root)


def test_rendered_twice_is_the_same_bytes_and_small(made, tmp_path):
    study, table = made
    first = report.render(study, table, tmp_path / "a", ("html", "md", "tex", "figures"))
    shuffled = results.table(study.name, reversed(table.rows), table.curves)
    second = report.render(study, shuffled, tmp_path / "b", ("html", "md", "tex", "figures"))
    assert [path.name for path in first] == [path.name for path in second]
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes(), a.name
    assert (tmp_path / "a" / "synthetic.html").stat().st_size < 3_000_000


def test_device_hours_count_a_shared_device_once(made):
    study, table = made
    seconds = 12.5 * (2 * 3 * 2 + 2 * 4)  # of every tuning run and comparison, five side by side
    assert dict(report.view_of(study, table)["cost"])["device-hours"] == f"{seconds / 5 / 3600:.3g}"


def test_a_report_holds_what_a_reviewer_asks_for(made, tmp_path):
    study, table = made
    report.render(study, table, tmp_path, ("html", "md"))
    page, text = ((tmp_path / f"synthetic.{kind}").read_text() for kind in ("html", "md"))
    for said in (study.question, "What would change", "Deviations", "device-hours", "torch", "Raw points", "TOST"):
        assert said in page
    for row in table.rows:
        assert row["run_id"] in page
        assert report.markdown_escape(row["run_id"]) in text
    for title in ("Paired differences", "Learning curves", "Learning rates"):
        assert title in page


@pytest.mark.parametrize("payload", [" ".join(PAYLOADS[:4]), " ".join(PAYLOADS[4:])])
def test_no_field_of_a_record_becomes_markup(made, tmp_path, payload):
    study, table = made
    plain = report.view_of(study, table)
    numbers = {"lr", "seed", "steps", "batch", "epochs", "token_budget"}
    fields = [key for key in table.rows[0] if isinstance(table.rows[0][key], str)]
    fixed = {"settings", "at", "purpose", "status", "arm", "fingerprint", "oelm", "torch"} | numbers
    rows = [row | {key: f"{row[key]}{payload}" for key in fields if key not in fixed} for row in table.rows]
    rows = [row | {"error": payload} for row in rows]
    bad = results.table(study.name, rows, table.curves)
    wild = study.model_copy(update={"question": payload, "notes": [payload]})
    view = report.view_of(wild, bad)
    assert Elements(report.template_text(view, "report.html.j2")).kinds <= Elements(
        report.template_text(plain | {"study_notes": ["x"]}, "report.html.j2")
    ).kinds | {("text", ("style", "transform", "x", "y"))}
    markdown = report.template_text(view, "report.md.j2")
    latex = report.template_text(view, "report.tex.j2")
    for text in (markdown, latex):
        assert "\x1b" not in text
    assert "<script" not in markdown.replace("\\<", "")
    assert "](javascript" not in markdown.replace("\\]", "").replace("\\(", "")
    assert "\\input{" not in latex
    assert "$x" not in latex.replace("\\$", "")


def test_every_arm_name_is_escaped_in_figures_and_tables(made):
    study, table = made
    bad = '<img src="x">&$_\\'
    rows = [row | {"arm": bad if row["arm"] == "oelm-freeze" else row["arm"]} for row in table.rows]
    family = [c.model_copy(update={"arm": bad}) if c.arm == "oelm-freeze" else c for c in study.family]
    view = report.view_of(study.model_copy(update={"family": family}), results.table("synthetic", rows, table.curves))
    page = report.template_text(view, "report.html.j2")
    assert "<img" not in page
    assert "&lt;img" in page
    assert "<img" not in report.template_text(view, "report.md.j2").replace("\\<", "")


def test_latex_table_is_balanced(made, tmp_path):
    study, table = made
    (path,) = report.render(study, table, tmp_path, ("tex",))
    text = path.read_text()
    assert text.count("\\begin{") == text.count("\\end{") == 4
    assert text.count("\\toprule") == text.count("\\bottomrule") == 2
    rows = [line for line in text.splitlines() if line.endswith("\\\\")]
    assert {line.replace("\\&", "").count("&") for line in rows} == {7, 6}


def test_one_seed_nan_and_missing_arms_still_make_a_report(tmp_path):
    study = lm_study(tuning=None, seeds=[1])
    for one in expand(study):
        if one.arm != "gauss-frozen":
            status = "diverged" if one.arm == "oelm-freeze" else "done"
            save(tmp_path, record(one, study.name, loss=float("nan") if status == "diverged" else 3.0, status=status))
    table = results.collect(study, tmp_path)
    view = report.view_of(study, table)
    page = report.template_text(view, "report.html.j2")
    assert "never a verdict from one seed" in page or "no pair of finished runs" in page
    shown = page[: page.index("<script>")].replace("became NaN", "")
    assert "NaN" not in shown
    assert ">nan" not in shown
    assert any("1 runs diverged" in line for line in view["deviations"])
    assert any("were not made" in line for line in view["deviations"])


def test_a_study_without_any_run_says_so(tmp_path):
    study = lm_study()
    view = report.view_of(study, results.collect(study, tmp_path))
    assert "no answer" in view["answer"][0]
    assert report.template_text(view, "report.html.j2")


def test_demonstrations_are_marked_everywhere(tmp_path):
    study = lm_study(seeds=[11, 12, 13])
    run_study(study, tmp_path, effect={"oelm-freeze": 0.5}, data={"status": "demo"})
    view = report.view_of(study, results.collect(study, tmp_path))
    for kind in ("html", "md", "tex"):
        assert "demonstration" in report.template_text(view, f"report.{kind}.j2").lower()
    assert "no evidence" in view["answer"][0]
    assert all(c["verdict"].startswith("demonstration") for c in view["comparisons"])


def test_the_third_sentence_says_how_the_gap_moves(tmp_path):
    study = lm_study(tuning=None, arms=("baseline", "oelm-freeze"), axes={"budget.steps": [100, 400]})
    for one in expand(study):
        steps = one.run.budget.steps
        gap = 0.0 if one.arm == "baseline" else steps / 2000
        loss = 3 + gap + (one.run.seed * 7919 % 13) / 1000 * (1 if one.arm == "baseline" else 0.5)
        save(tmp_path, record(one, study.name, loss=loss, data={"tokens_seen": steps * 512}))
    view = report.view_of(study, results.collect(study, tmp_path))
    assert "grows with training" in view["answer"][2]
    assert any(figure.name == "gap-over-tokens" for figure in view["figures"])


@pytest.mark.slow
def test_index_and_final_report(made, tmp_path, monkeypatch):
    study, table = made
    results.write(table, tmp_path / "results")
    monkeypatch.setattr(final, "load_study", lambda _: study)
    written = final.render_all(tmp_path / "results", tmp_path / "out", ("html", "md"), {"synthetic": tmp_path})
    assert {path.name for path in written} == {"synthetic.html", "synthetic.md", "index.html", "final.html", "final.md"}
    page = (tmp_path / "out" / "final.html").read_text()
    assert "44,896,768" in page
    assert "wikipedia" in page
    before = page
    final.render_all(tmp_path / "results", tmp_path / "out", ("html", "md"), {"synthetic": tmp_path})
    assert (tmp_path / "out" / "final.html").read_text() == before


def test_no_results_and_unknown_formats_are_one_line(made, tmp_path):
    with pytest.raises(DataError, match="oelm analyze"):
        final.render_all(tmp_path, tmp_path / "out", ("html",), {})
    with pytest.raises(ConfigError, match="did you mean 'html'"):
        report.render(*made, tmp_path, ("htm",))


def test_without_a_browser_a_pdf_is_refused_in_one_line(made, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="Chromium"):
        report.render(*made, tmp_path, ("pdf",))
    assert (tmp_path / "synthetic.html").exists()


# ---- in a browser


@pytest.fixture(scope="module")
def page_file(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    report.render(*made, folder, ("html",))
    return folder / "synthetic.html"


@pytest.fixture
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("Debian's Chromium is not installed: the page is not opened in a browser")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.browser
@pytest.mark.slow
def test_the_page_in_chromium(browser, page_file):
    """No request, no message; the tables sort; nothing overflows a narrow window; dark mode changes the ink."""
    inks = {}
    for width, scheme in ((1200, "light"), (1200, "dark"), (380, "light")):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page = context.new_page()
        said, asked = [], []
        page.on("console", lambda message, said=said: said.append(message.text))
        page.on("pageerror", lambda error, said=said: said.append(str(error)))
        page.on("request", lambda request, asked=asked: asked.append(request.url))
        page.goto(page_file.as_uri())
        assert said == []
        assert asked == [page_file.as_uri()]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        inks[scheme] = page.evaluate("getComputedStyle(document.body).color")
        svg = page.evaluate("getComputedStyle(document.querySelector('figure svg')).color")
        assert svg == inks[scheme]
        if width == 1200:
            heads = page.locator("table.sortable").first.locator("thead th button")
            column = [text.strip() for text in heads.all_inner_texts()].index("difference")
            heads.nth(column).click()
            cells = f"[...document.querySelector('table.sortable').tBodies[0].rows].map(r => +r.cells[{column}].dataset.order)"
            values = page.evaluate(cells)
            assert values == sorted(values)
            heads.nth(column).click()
            assert page.evaluate(cells) == sorted(values, reverse=True)
            page.emulate_media(media="print")
            page.evaluate("dispatchEvent(new Event('beforeprint'))")
            assert page.evaluate("[...document.querySelectorAll('details')].every(d => d.open)")
        context.close()
    assert inks["light"] != inks["dark"]


@pytest.mark.browser
@pytest.mark.slow
def test_the_pdf(made, tmp_path):
    if shutil.which("chromium") is None:
        pytest.skip("Debian's Chromium is not installed: no PDF is printed")
    written = report.render(*made, tmp_path, ("pdf",))
    assert written[-1].read_bytes().startswith(b"%PDF-")
    assert written[-1].stat().st_size > 20_000
