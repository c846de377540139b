"""Joins what `kgen bench --json` and `kgen tune --json` printed on a GPU machine to a result file.

    python tools/publish_results.py bench.json --tune tune.json --tune-command "kgen tune ..." \
        --commit HASH results/dense.json

A bench that was taken in parts is joined by --more PART.json. Keeps what both printed, adds the
commit where the machine had no git, refuses a run that is not whole (a peer that was asked for and
missing, unless --without names it, counts too). Then run tools/readme_tables.py, and
`kgen plot floor --report` where floors were measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kgen.bench.summary import summarise

#: What parts of one bench have in common.
SAME: Final = ("commit", "device", "driver", "torch", "kgen", "policy", "providers")


def merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One bench from parts of it; raises ValueError where they are not of one kind, or overlap.

    The floor's rate is the first part's; a problem that one part did not reach may be in another.
    """
    whole = {**parts[0], "rows": [], "missing": {}, "not_reached": []}
    whole["command"] = "; ".join(dict.fromkeys(part["command"] for part in parts))
    for part in parts:
        differing = [name for name in SAME if part.get(name) != parts[0].get(name)]
        if differing or ("floor" in part) != ("floor" in parts[0]):
            raise ValueError(f"{part['command']}: other {', '.join(differing) or 'floor'}")
        whole["rows"] += part["rows"]
        whole["missing"] |= part.get("missing", {})
        whole["not_reached"] += part.get("not_reached", [])
    shapes = [row["shape"] for row in whole["rows"]]
    if repeated := sorted({shape for shape in shapes if shapes.count(shape) > 1}):
        raise ValueError(f"in more than one part: {', '.join(repeated)}")
    whole["not_reached"] = [shape for shape in whole["not_reached"] if shape not in shapes]
    if "floor" in whole:
        streams = [stream for part in parts for stream in part["floor"]["streams"]]
        whole["floor"] = {**whole["floor"], "streams": streams}
    return {**whole, "summary": summarise(whole)}


def join(
    bench: dict[str, Any],
    tune: dict[str, Any] | None,
    tune_command: str,
    commit: str,
    without: Sequence[str] = (),
) -> dict[str, Any]:
    """The result file; raises ValueError, with every reason, for a run that is not whole."""
    joined = dict(bench)
    if bench.get("commit") in (None, "", "unknown"):
        joined["commit"] = commit
    if tune is not None:
        joined["tune"] = {**tune, "command": tune_command}
    reasons = problems_of(joined)
    missing = {name: why for name, why in bench.get("missing", {}).items() if name not in without}
    reasons += [f"{name} was asked for and missing: {why}" for name, why in missing.items()]
    if commit and joined["commit"] != commit:
        reasons.append(f"the bench ran at commit {joined['commit']}, not {commit}")
    if tune is not None and not tune_command:
        reasons.append("--tune without --tune-command: a result names the command that made it")
    if reasons:
        raise ValueError("\n".join(reasons))
    return joined


def problems_of(results: dict[str, Any]) -> list[str]:
    """Why these results must not be published."""
    reasons = [
        f"no {name}" for name in ("command", "commit", "device", "driver") if not results.get(name)
    ]
    if results.get("commit", "").endswith("-dirty"):
        reasons.append(f"commit {results['commit']}: the sources were changed after it")
    for row in results["rows"]:
        if "median_us" not in row["providers"].get("kgen", {}):
            note = row["providers"].get("kgen", {}).get("note", "not timed")
            reasons.append(f"{row['shape']}: {note}")
    reasons += [f"{shape}: the run was interrupted" for shape in results.get("not_reached", [])]
    tune = results.get("tune", {"problems": []})
    for problem in tune["problems"]:
        if problem["outcome"] != "tuned":
            reasons.append(f"{problem['problem']}: {problem['outcome']}, {problem['reason']}")
    return reasons


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the file was written, 1 with the reasons when not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bench", type=Path, help="output of kgen bench --json")
    parser.add_argument("out", type=Path, help="result file to write, such as results/dense.json")
    parser.add_argument(
        "--more", type=Path, action="append", default=[], help="a further part of the same bench"
    )
    parser.add_argument("--tune", type=Path, help="output of kgen tune --json")
    parser.add_argument("--tune-command", default="", help="the command that printed it")
    parser.add_argument(
        "--without", action="append", default=[], metavar="PEER", help="may be missing"
    )
    parser.add_argument("--commit", default="", help="commit of the sources that ran")
    args = parser.parse_args(argv)
    benches = [json.loads(path.read_text()) for path in (args.bench, *args.more)]
    tune = json.loads(args.tune.read_text()) if args.tune else None
    try:
        bench = merge(benches) if args.more else benches[0]
        joined = join(bench, tune, args.tune_command, args.commit, args.without)
    except ValueError as error:
        print(error)
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(joined, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
