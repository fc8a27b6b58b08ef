"""`python -m oelm` is the `oelm` command."""

from oelm.cli.main import main


if __name__ == "__main__":
    main()
