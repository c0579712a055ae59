"""What may be said once a minute is said at once, then seldom, and no event is left uncounted."""

from agent.system.rate_limit import INTERVAL_S, RateLimiter


def test_the_first_is_told_at_once_and_the_rest_once_a_minute_with_their_number() -> None:
    now = 0.0
    seldom = RateLimiter(lambda: now)
    assert [seldom.tick() for _ in range(4)] == [1, 0, 0, 0]
    now = INTERVAL_S - 0.1
    assert seldom.tick() == 0
    now = INTERVAL_S
    assert [seldom.tick(), seldom.tick()] == [5, 0]
    now = 5 * INTERVAL_S
    assert seldom.tick() == 2
