"""What all tests share.

Property tests (hypothesis) have two profiles:

* ``ci``, the default: the same examples in each run, so a red run is red again; a failure prints a blob that
  `@reproduce_failure` takes.
* ``dev`` (``pytest --hypothesis-profile dev``): other examples each time, and more of them; for looking for trouble.
"""

from hypothesis import HealthCheck, settings

# A deadline per example would fail on a busy machine; pytest-timeout bounds the whole test.
settings.register_profile(
    "ci",
    derandomize=True,
    print_blob=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", max_examples=1000, print_blob=True, deadline=None)
settings.load_profile("ci")
