"""What happens to a host's own devices, end to end: causes are made, and two strangers say what they heard.

    stage.py        an agent, who listens to it (listeners.py), and the clock between cause and message
    figures.py      how long each cause took to its message, in one table at the end (``pytest -rP``)
    paper_host.py   a host of plain files, with eight NUMA nodes, so that each can be sick of something else
    hosts.py        the two that most tests are about; conftest.py starts their agents, each once

Modules go by their names: what is asked of the real host stands first, and what takes a minute last, so that
most of that minute is over by then.
"""
