"""Rate limiter: the first event is reported at once, later ones once a minute, all are counted."""

from agent.system.timing import LOG_INTERVAL_S, LogRateLimiter


def test_limiter_reports_first_event_and_then_counts_once_a_minute() -> None:
    now = 0.0
    seldom = LogRateLimiter(lambda: now)
    assert [seldom.tick() for _ in range(4)] == [1, 0, 0, 0]
    now = LOG_INTERVAL_S - 0.1
    assert seldom.tick() == 0
    now = LOG_INTERVAL_S
    assert [seldom.tick(), seldom.tick()] == [5, 0]
    now = 5 * LOG_INTERVAL_S
    assert seldom.tick() == 2
