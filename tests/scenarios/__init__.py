"""Scenarios with GPUs, as a table, and the stage that plays them with the real agent.

    table.py    all rows, defined by theme in signals.py, xids.py, driver.py, hangs.py and recovery.py
    row.py      a row; steps.py, the steps of a row
    stage.py    plays a row, with machine_files.py and clients.py

A row is a list of steps: an action, then an expected result, as seen by two clients: a kubelet on a driver's
socket, and a reader of ``agent.sock``. Times are not checked, but the order is: each device must go through
exactly the healths of the row.
"""
