"""How patiently work is tried again that lost its worker."""

import dataclasses

from nearsight.work.pool import Attempt, Backlog, Retries


def test_what_costs_every_worker_is_given_up() -> None:
    """Halved from the second loss on, with longer and longer waits; progress in between starts the count anew."""
    cells = (0, 1, 2, 3)
    retries = Retries(most=3, first_wait=1.0, longest_wait=3.0)
    backlog = Backlog([cells], retries)
    whole = backlog.take(0.0)
    assert whole is not None
    assert backlog.lost(whole, whole.items, progressed=True, now=10.0) == 1.0
    assert backlog.take(10.9) is None
    again = backlog.take(11.0)
    assert again is not None
    assert (again.items, again.losses, again.lost_tokens) == (cells, 1, (whole.token,))
    assert backlog.lost(again, again.items, progressed=False, now=11.0) == 2.0
    halves = [backlog.take(13.0), backlog.take(13.0)]
    assert [half.items if half else () for half in halves] == [cells[:2], cells[2:]]
    assert halves[0] is not None
    assert backlog.lost(halves[0], cells[1:2], progressed=False, now=13.0) == 3.0
    last = backlog.take(16.0)
    assert last is not None
    assert (last.items, last.losses) == (cells[1:2], 3)
    assert last.lost_tokens == (whole.token, again.token, halves[0].token)
    assert backlog.lost(last, last.items, progressed=False, now=16.0) is None
    assert backlog.lost(dataclasses.replace(last, losses=3), last.items, progressed=True, now=16.0) == 1.0
    assert len({attempt.token for attempt in (whole, again, *halves, last) if isinstance(attempt, Attempt)}) == 5
