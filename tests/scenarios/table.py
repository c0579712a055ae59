"""Table of all scenarios; long ones come first, so that they do not run alone at the end."""

from typing import Final

from scenarios.driver import WHOLE
from scenarios.hangs import TROUBLES
from scenarios.recovery import RECOVERIES
from scenarios.row import Row
from scenarios.signals import SIGNALS
from scenarios.xids import ANNOUNCED

ROWS: Final[tuple[Row, ...]] = (*WHOLE, *RECOVERIES, *TROUBLES, *ANNOUNCED, *SIGNALS)
TABLE: Final = tuple(sorted(ROWS, key=lambda row: -row.limit_s))
