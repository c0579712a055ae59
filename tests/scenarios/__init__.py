"""What happens to a node's GPUs, and what a client must hear of it: a table of scenarios, and its stage.

    table.py    all rows; they stand by theme in signals.py, xids.py, driver.py, hangs.py and recovery.py
    row.py      what a row is; steps.py, what it can say
    stage.py    how it is played, on machine_files.py and under the ears of ears.py

A row is a list of steps: something is done, then something must be seen. Seen is what two strangers hear, one
on a driver's socket as the kubelet, one on ``agent.sock``. How fast, nobody judges. In which order, and that
nothing else changed, they do: each device must go through just the healths that the row says.
"""
