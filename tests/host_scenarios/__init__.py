"""End-to-end scenarios of a host's own devices: faults are caused, and two subscribers report what they
receive.

    stage.py        an agent, its subscribers (subscribers.py), and the time from cause to message
    figures.py      table of these times at the end (``pytest -rP``)
    paper_host.py   a host of plain files with eight NUMA nodes, so that each can have another fault
    hosts.py        the two hosts of most tests; conftest.py starts their agents once each

Modules run in the order of their names: scenarios of the real host first, those that take a minute last, so
that most of that minute is over by then.
"""
