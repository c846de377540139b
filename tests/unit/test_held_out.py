"""The held-out problems: enough, odd, of other models, and unchanged."""

from __future__ import annotations

import hashlib

from kgen.shapes import load_shapes

#: Of the problems' lines, sorted. The file is fixed: results on it stay comparable.
DIGEST = "dd948df1c03203c1c21d4a95be5bf9c3aec72b24da4fbe94a49d78e8b1b9f3fc"


def test_held_out_problems_are_other_ones() -> None:
    """At least 40, no (N, K) of deepseek_v3.txt, few M that a tile divides."""
    problems = [line.problem for line in load_shapes("held_out").lines]
    known = {(line.problem.n, line.problem.k) for line in load_shapes("deepseek_v3").lines}
    assert len(problems) == len(set(problems)) >= 40
    assert not known & {(p.n, p.k) for p in problems}
    assert len({(p.n, p.k) for p in problems}) >= 25
    assert {3, 37, 111, 222, 777, 1500, 5000} <= {p.m for p in problems}
    assert all(p.m % 16 for p in problems)
    assert any(p.k % 128 for p in problems)
    assert any(p.n % 128 for p in problems)


def test_held_out_problems_are_the_ones_fixed_first() -> None:
    """A change would let a fit choose what it is judged on."""
    lines = sorted(str(line.problem) for line in load_shapes("held_out").lines)
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == DIGEST
