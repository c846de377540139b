"""Which choices decided? `axis_importance`, from the times of one problem's configurations.

Takes times by configuration, gives a share for each axis, by Optuna's PED-ANOVA (Watanabe et al.,
IJCAI 2023): how much the values of an axis among the fastest differ from those among all that were
tried. Must not import build, verify, measure, cache or torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final

from kgen.config import GemmConfig

#: Share of the trials that count as the fastest.
FASTEST: Final = 0.1
#: With fewer configurations the fastest are too few to have anything in common.
LEAST_TIMED: Final = 20


def axis_importance(times_us: Mapping[GemmConfig, float]) -> dict[str, float]:
    """Shares by axis, adding up to 1, the largest first; empty for fewer than LEAST_TIMED times.

    An axis that has one value among them is left out: it decided nothing. So is everything where
    the fastest are spread as all are.
    """
    import optuna

    if len(times_us) < LEAST_TIMED:
        return {}
    rows = [config.to_dict() for config in times_us]
    values = {name: sorted({row[name] for row in rows}) for name in rows[0]}
    axes = {name: found for name, found in values.items() if len(found) > 1}
    if not axes:
        return {}
    # By place among the values that were tried: neighbours are alike, names are few.
    distributions: dict[str, Any] = {
        name: optuna.distributions.IntDistribution(0, len(found) - 1)
        for name, found in axes.items()
    }
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="minimize")
    study.add_trials(
        [
            optuna.trial.create_trial(
                params={name: found.index(row[name]) for name, found in axes.items()},
                distributions=distributions,
                value=us,
            )
            for row, us in zip(rows, times_us.values(), strict=True)
        ]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # What was tried is no even sample of the space: compared with that, not with the space.
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(
            target_quantile=FASTEST, region_quantile=1.0, evaluate_on_local=True
        )
        found = optuna.importance.get_param_importances(study, evaluator=evaluator, normalize=False)
    total = sum(found.values())
    if not total > 0:
        return {}
    return {name: value / total for name, value in found.items()}
