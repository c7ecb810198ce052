"""The same random program on every store and on a model that keeps everything in full."""

from hypothesis import HealthCheck, settings

from holdfast.testing.machine import StoreMachine

TestStoresAgainstTheModel = StoreMachine.TestCase
TestStoresAgainstTheModel.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
