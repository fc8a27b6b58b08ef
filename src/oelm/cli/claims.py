"""oelm claims: the original's claims, what arithmetic and measurement say of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command(epilog="Examples: oelm claims · oelm claims --json · oelm claims --out docs/claims.md")(claims)


def claims(
    results: Annotated[Path, typer.Option("--results", help="Where oelm analyze wrote the CSV files.")] = Path(
        "results"
    ),
    out: Annotated[Path | None, typer.Option("--out", help="Write the ledger there as Markdown.")] = None,
    json: Annotated[bool, typer.Option("--json", help="The ledger as JSON on stdout.")] = False,
) -> None:
    """List the original's claims with the verdict on each."""
    from oelm.cli import output
    from oelm.evidence import claims as ledgers
    from oelm.evidence.results import replace_text

    entries = ledgers.ledger(ledgers.measured_in(results))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_text(out, ledgers.markdown(entries))
        output.note(f"wrote {out}")
    elif json:
        output.as_json(entries)
    else:
        for entry in entries:
            print(output.clean(f"{entry['verdict']:<11} {entry['said']}"))
            for text in (entry["arithmetic"], entry["why"]):
                if text:
                    print(output.clean(f"{'':<11} {text}"))
        print(", ".join(f"{number} {name}" for name, number in ledgers.counts(entries).items()))
