"""Write the small database of the present schema that tests/data keeps for good.

    python tools/schema_sample.py tests/data/schema_v1.db

Once a schema is released its sample is never made again: later versions must read it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kgen.cache.db import TuningDatabase
from kgen.cache.records import ProblemOutcome, TrialRecord, provenance
from kgen.config import GemmConfig
from kgen.device import H200
from kgen.problem import GemmProblem


def main(path: Path) -> None:
    """Make the sample at `path`, which must not exist."""
    if path.exists():
        sys.exit(f"{path} exists: samples of released schemas stay as they are")
    problem = GemmProblem("dense", 64, 2112, 7168)
    origin = provenance(
        H200,
        driver="580.95",
        cuda="13.0",
        compiler="nvrtc-13.0.88",
        template_hash="ab" * 32,
        generator="kgen 0.1.0",
        clocks={"sm_mhz": 1755.0, "mem_mhz": 3201.0},
    )
    with TuningDatabase.open(path) as db:
        run = db.begin_run("kgen tune --shapes sample.txt", {"seed": 0})
        for number, us in enumerate((12.0, 10.0)):
            ok = TrialRecord(
                problem=problem,
                config=GemmConfig(block_m=64, num_math_warpgroups=1, block_n=96 + 8 * number),
                device_name=H200.name,
                num_sms=H200.num_sms,
                cubin_key=str(number) * 64,
                status="ok",
                verified=True,
                error=1.7e-3,
                median_us=us,
                p10_us=us - 0.25,
                p90_us=us + 0.5,
                samples_us=(us - 0.25, us, us + 0.5),
                predicted_us=9.0,
                policy="cold",
                registers=168,
                provenance=origin,
            )
            db.record(ok, run.id)
        wrong = TrialRecord(
            problem=problem,
            config=GemmConfig(),
            device_name=H200.name,
            num_sms=H200.num_sms,
            cubin_key="f" * 64,
            status="wrong",
            reason="tile (0, 3): relative error 0.0175",
            provenance=origin,
        )
        db.record(wrong, run.id)
        tuned = ProblemOutcome(
            problem=problem,
            device_name=H200.name,
            num_sms=H200.num_sms,
            outcome="tuned",
            num_trials=3,
            invalid_by_rule={"smem_bytes": 12},
            details={"sampler": "tpe"},
        )
        db.record_outcome(tuned, run.id)
        untunable = ProblemOutcome(
            problem=problem.with_m(65),
            device_name=H200.name,
            num_sms=H200.num_sms,
            outcome="untunable",
            reason="no valid configuration",
        )
        db.record_outcome(untunable, run.id)
        db.end_run(run.id)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
