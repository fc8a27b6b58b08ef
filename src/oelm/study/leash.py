"""`python -m oelm.study.leash PARENT PROGRAM...`: become the program, and die when the parent does (the leash stays on)."""

import os
import sys

from oelm.study.worker import leash


if __name__ == "__main__":
    leash(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
