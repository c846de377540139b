"""The runtime with a real compiler and a real artifact store, on a driver made of callbacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kgen.cache.artifacts import ArtifactStore
from kgen.compiler import Compiler
from kgen.problem import GemmProblem
from kgen.runtime import dispatch, driver
from kgen.runtime.dispatch import Dispatcher, StoredBuilder
from kgen.runtime.stats import KgenWarning, Stats
from kgen.settings import Settings
from tests.unit.fake_driver import FakeDriver
from tests.unit.test_tma import forget


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    fake.version = 99000
    monkeypatch.setattr(driver, "_api", lambda: fake)
    monkeypatch.setattr(dispatch, "is_capturing", lambda ordinal: False)
    forget()
    yield fake
    forget()


def test_every_m_is_served_by_few_builds_and_a_second_process_builds_none(
    fake: FakeDriver, tmp_path: Path, nvrtc: Compiler
) -> None:
    settings = Settings(cache_dir=tmp_path, compiler="nvrtc")

    def run(stats: Stats) -> Dispatcher:
        dispatcher = Dispatcher(0, StoredBuilder(settings), settings.db_url, stats)
        for m in (1, 3, 16, 64, 65, 100):
            assert dispatcher.plan(GemmProblem("dense", m, 64, 256)).kernel is not None
        return dispatcher

    first, second = Stats(), Stats()
    with pytest.warns(KgenWarning, match="default configurations, not tuned ones"):
        dispatcher = run(first)
    builds = first.snapshot()["compiles"]
    assert 1 <= builds <= 4
    assert first.snapshot()["cache_hits"] == 0
    with pytest.warns(KgenWarning):
        run(second)
    assert second.snapshot()["compiles"] == 0
    assert second.snapshot()["cache_hits"] == builds
    assert not Path(tmp_path / "tuning.db").exists()
    plan = dispatcher.plan(GemmProblem("dense", 64, 64, 256))
    assert plan.choice is not None
    key = StoredBuilder(settings).key(GemmProblem("dense", 7, 64, 256), plan.choice.config)
    assert ArtifactStore(tmp_path).get(key) is not None


def test_a_driver_older_than_the_compiler_is_a_reason(
    fake: FakeDriver, tmp_path: Path, nvrtc: Compiler
) -> None:
    from kgen.errors import CompilerMissing

    fake.version = 11000
    with pytest.raises(CompilerMissing, match=r"supports CUDA 11\.0"):
        StoredBuilder(Settings(cache_dir=tmp_path, compiler="nvrtc"))
