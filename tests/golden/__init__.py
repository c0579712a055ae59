"""Golden files: what drahealth reads, writes and sends, recorded from an earlier release.

``make.py`` runs the cases of this package and stores their results; ``tests/test_golden_*.py`` run the same
cases on today's code and compare. A rename or a reworded text leaves every test green. A test that fails
shows a change that a user, a script, a driver or the next release can notice.

What is stored, and which module has the cases:

- ``documents/``: exit code and ``-o json`` document of every verb, on the fixed trees of ``inputs/``
  (``commands.py``), and what ``conform`` concludes from fixed observations (``conformance.py``).
- ``stories/``: the report after each step of a node's life: faults, recoveries, restarts (``stories.py``).
- ``release_0_1/``: files that release 0.1 wrote, with their decoded values (``release.py``).
- ``messages.json`` and ``replies.json``: protobuf messages, byte for byte, and how requests of drivers are
  understood and answered (``messages.py``).
- ``surface/``: flags, configuration keys with defaults and limits, exit codes, numbers of protobuf fields,
  file names, taint keys, names of budgets (``surface.py``).

``compare.py`` says what is compared. Texts for people are free: of these only the codes
in them count, and golden files hold nothing else of them.
``inputs/`` is written by hand, or once by a release, and never by ``make.py``.

After an intended change, run ``python -m golden.make`` in ``tests/`` and read the diff.
"""
