"""What Nsight Compute runs: one kernel, verified, then launched in a range of its own.

Takes a folder with what `kgen.search.profile` put there; run as
`python -m kgen.search.profile_target FOLDER`. Exits with 0, or writes why not into the folder.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Final

from kgen.errors import KgenError
from kgen.search.child import load

#: Name of the range that is profiled, of the file with the work, and of the one with an error.
RANGE: Final = "kgen profile"
WORK: Final = "work.pickle"
ERROR: Final = "error.txt"


def main(folder: Path) -> int:
    """Launch the kernel once, after a launch that is not profiled; 1 with the reason in ERROR."""
    target, options, problem, cubin = pickle.loads((folder / WORK).read_bytes())
    try:
        body = load(target)(**options)
        body.hello()
        body.open(problem)
        body.verify(cubin)
        body.launch(cubin.key, "kgen warm-up")
        body.launch(cubin.key, RANGE)
    except KgenError as error:
        (folder / ERROR).write_text(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
