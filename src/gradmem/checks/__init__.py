"""Checks that every learner and policy must pass; yours too.

`check_learner(lambda network, seed: …)` and `check_policy(MyPolicy)` raise AssertionError with what
went wrong.
"""

from gradmem.checks.learner import CHECKS, Make, check_learner
from gradmem.checks.policy import POLICY_CHECKS, MakePolicy, check_policy
from gradmem.checks.same import _same

__all__ = [
    "CHECKS",
    "POLICY_CHECKS",
    "Make",
    "MakePolicy",
    "_same",
    "check_learner",
    "check_policy",
]
