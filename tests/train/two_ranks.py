"""What one rank of a test of two does; started by torchrun: FOLDER STYLE STEPS [die-at]."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from oelm.errors import OelmError
from oelm.train.loop import train


def main() -> int:
    from small_runs import small_run

    import oelm.data.recall

    oelm.data.recall.HELD_OUT_EXAMPLES = 32
    torch.set_num_threads(1)
    folder, style, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    die_at = int(sys.argv[4]) if len(sys.argv) > 4 else None
    thaw = {"base": "oelm-freeze", "thaw": {"order": "top-down", "start": 4, "end": 8}}
    run = small_run(model__dropout=0.0, variant=thaw, budget__steps=steps, budget__batch=8, budget__accumulate=2)

    def see(line: Any) -> None:
        if line["step"] == die_at and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        train(run, folder, device="cpu", progress="none", parallel=style, on_event=see, checkpoint_every=5)
    except OelmError as error:
        print(f"rank {os.environ.get('RANK')}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads may hang on a rank that was killed
