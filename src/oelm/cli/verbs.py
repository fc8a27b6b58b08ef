"""The table of verbs, in the order of --help. A verb's file holds one function, registered here."""

from __future__ import annotations

import typer

from oelm.cli.main import app


# (name, module, function): each module imports only typer and stdlib at the top.
