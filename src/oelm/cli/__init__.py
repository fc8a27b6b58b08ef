"""The `oelm` command: one thin file a verb. Owns options, messages and exit codes; refuses logic."""
