"""PDF of a rendered page, printed by the Chromium that is installed (docs/decisions/pdf.md).

The date that the browser writes into it is taken out, so that one browser prints one page as the same bytes. Refuses, in
one line, where there is no Chromium; the page itself prints from any browser.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from oelm.errors import MachineError


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 120
_DATES = re.compile(rb"(/(?:CreationDate|ModDate) ?)\(D:\d{14}([^)]{0,8})\)")  # as many bytes again: offsets stay right


def find_browser() -> str | None:
    """The program of the first Chromium on the path."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def print_pdf(page: Path, target: Path) -> Path:
    """Print the HTML file; the browser reads that one file and has a profile of its own that is thrown away."""
    browser = find_browser()
    if browser is None:
        raise MachineError(
            f"{target}: a PDF needs Chromium or Chrome, and none of {', '.join(BROWSERS)} is on the path; install one, or print {page} from a browser"
        )
    with tempfile.TemporaryDirectory(prefix="oelm-pdf-") as profile:
        made = Path(profile) / "page.pdf"
        command = [browser, "--headless", "--disable-gpu", "--no-pdf-header-footer", "--disable-extensions"]
        command += [f"--user-data-dir={profile}/profile", f"--print-to-pdf={made}", page.resolve().as_uri()]
        if os.geteuid() == 0:  # Chromium's sandbox does not start for root; the page holds no foreign script
            command.insert(1, "--no-sandbox")
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MachineError(f"{target}: {browser} did not print the page ({error}); print {page} by hand") from None
        if not made.is_file():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise MachineError(
                f"{target}: {browser} ended with {done.returncode} and no PDF ({last[:160]}); print {page} by hand"
            )
        try:
            target.write_bytes(_DATES.sub(rb"\1(D:19700101000000\2)", made.read_bytes()))
        except OSError as error:
            raise MachineError(f"{target}: cannot be written ({error.strerror or error}); check the folder") from None
    return target
