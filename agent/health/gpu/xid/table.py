"""Table of all XIDs that NVIDIA's drivers report.

The decision on an XID, from its row and the GPU's state, is in agent.health.gpu.xid.rules. The four letters
of a row answer: is restarting the program enough, is a GPU reset enough, is a reboot enough, is hardware
suspected? (y)es, (n)o, (m)aybe, (-) nothing is needed, (?) not known, (t) see the text of the XID.

Sources: NVIDIA's XID catalog, and other agents where they agree with it.
"""

from typing import Final

from agent.health.gpu.xid.values import (
    XidAdvice,
    XidClass,
    XidCondition,
    XidEffect,
    XidGrade,
    XidRow,
    parse_repairs,
)
from agent.model.faults import Cure
from agent.model.health import Blame


def _row(
    code: int,
    xid_class: XidClass,
    meaning: str,
    grade: XidGrade,
    letters: str,
    mark: XidEffect,
    condition: XidCondition,
    cure: Cure,
    blame: Blame,
    advice: XidAdvice,
) -> XidRow:
    return XidRow(
        code, xid_class, meaning, grade, parse_repairs(letters), mark, condition, cure, blame, advice
    )


def _program(xid_class: XidClass, engine: str, *codes: int, first: int = 0) -> list[XidRow]:
    """Return one table row per code, for faults of engines of one kind that are numbered from ``first``."""
    return [
        _row(code, xid_class, f"{engine} {number} fault", XidGrade.WARN, "yyyn", XidEffect.NEVER,
             XidCondition.PLAIN, Cure.EXPIRES, Blame.WORKLOAD, XidAdvice.CHECK_WORKLOAD)
        for number, code in enumerate(codes, first)
    ]  # fmt: skip


# fmt: off
_C, _G, _X = XidCondition, XidGrade, XidClass
_HARDWARE, _DRIVER, _WORKLOAD, _SETUP = Blame.HARDWARE, Blame.DRIVER, Blame.WORKLOAD, Blame.CONFIGURATION
_A = XidAdvice

_YES, _COND, _NO = XidEffect.ALWAYS, XidEffect.CONDITIONAL, XidEffect.NEVER
_EXPIRES, _ACTION, _RESET, _REBOOT = Cure.EXPIRES, Cure.ACTION, Cure.RESET, Cure.REBOOT

ALWAYS: Final = (
    _row(46, _X.GPU, "the GPU stopped making progress", _G.FATAL, "nyym", _YES, _C.PLAIN,
         _RESET, _HARDWARE, _A.RESET_GPU),
    _row(48, _X.MEMORY, "uncorrectable (two-bit) ECC error", _G.FATAL, "nyym", _YES, _C.PLAIN,
         _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(54, _X.POWER, "auxiliary power is missing or loose", _G.FATAL, "nnny", _YES, _C.PLAIN,
         _REBOOT, _HARDWARE, _A.CHECK_POWER),
    _row(62, _X.FIRMWARE, "a micro-controller on the chip halted", _G.FATAL, "nyym", _YES, _C.PLAIN,
         _RESET, _HARDWARE, _A.RESET_GPU),
    _row(64, _X.MEMORY, "replacing a bad memory row or page failed", _G.FATAL, "nyym", _YES, _C.REMAP_FAILED,
         _RESET, _HARDWARE, _A.RESET_GPU),
    _row(79, _X.BUS, "the GPU no longer answers on PCIe", _G.FATAL, "nmym", _YES, _C.LOST_AGAIN,
         _REBOOT, _HARDWARE, _A.REBOOT),
    _row(95, _X.MEMORY, "uncontained memory error: all programs at risk", _G.FATAL, "nyym", _YES, _C.PLAIN,
         _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(110, _X.FIRMWARE, "security unit fault", _G.FATAL, "nyym", _YES, _C.PLAIN,
         _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(119, _X.FIRMWARE, "GSP firmware does not answer the driver", _G.FATAL, "nyym", _YES, _C.PLAIN,
         _ACTION, _DRIVER, _A.RESET_GPU),
    _row(120, _X.FIRMWARE, "GSP firmware fault", _G.FATAL, "nyym", _YES, _C.PLAIN,
         _ACTION, _DRIVER, _A.RESET_GPU),
    _row(136, _X.NVLINK, "NVLink training failed", _G.FATAL, "nyym", _YES, _C.PLAIN,
         _ACTION, _HARDWARE, _A.CHECK_LINKS),
    _row(140, _X.MEMORY, "memory error that row replacement did not catch", _G.FATAL, "nyym", _YES, _C.PLAIN,
         _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(143, _X.GPU, "the GPU failed to initialise", _G.FATAL, "nyym", _YES, _C.PLAIN,
         _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(150, _X.NVLINK5, "NVLink controller degraded, or its watchdog", _G.FATAL, "nyym", _YES, _C.PLAIN,
         _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(151, _X.HOST, "key rotation of confidential computing failed", _G.ERROR, "nmyn", _YES, _C.PLAIN,
         _REBOOT, _DRIVER, _A.RESTART_VM),
    _row(158, _X.GPU, "fatal timeout of the GPU", _G.FATAL, "nyym", _YES, _C.PLAIN,
         _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(167, _X.BUS, "fatal PCIe timeout", _G.FATAL, "nmym", _YES, _C.PLAIN,
         _ACTION, _HARDWARE, _A.REBOOT),
    _row(169, _X.FIRMWARE, "the SEC2 micro-controller halted", _G.FATAL, "nmym", _YES, _C.PLAIN,
         _ACTION, _HARDWARE, _A.REBOOT),
    _row(173, _X.C2C, "chip-to-chip link to the CPU failed", _G.FATAL, "nmym", _YES, _C.PLAIN,
         _ACTION, _HARDWARE, _A.REBOOT),
)

CONDITIONAL: Final = (
    _row(63, _X.MEMORY, "bad memory row or page, replaced at the next reset", _G.WARN, "-yyn", _COND,
         _C.REMAP_PENDING, _ACTION, _HARDWARE, _A.RESET_LATER),
    _row(74, _X.NVLINK, "NVLink fault", _G.ERROR, "nyym", _COND, _C.LINK_REGISTERS,
         _ACTION, _HARDWARE, _A.CHECK_LINKS),
    _row(94, _X.MEMORY, "contained memory error: only its program was affected", _G.ERROR, "yyym", _COND,
         _C.CONTAINED, _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(109, _X.GPU, "a context switch did not finish", _G.ERROR, "nyym", _COND, _C.STUCK,
         _ACTION, _DRIVER, _A.RESET_GPU),
    _row(142, _X.MEDIA, "video encoder 3 fault", _G.WARN, "mmmm", _COND, _C.RECOVERY_ACTION,
         _ACTION, _DRIVER, _A.FOLLOW_ACTION),
    _row(144, _X.NVLINK5, "NVLink SAW fault", _G.ERROR, "myym", _COND, _C.LINK_WORDS,
         _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(145, _X.NVLINK5, "NVLink RLW fault", _G.ERROR, "myym", _COND, _C.LINK_WORDS,
         _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(146, _X.NVLINK5, "NVLink TLW fault", _G.ERROR, "myym", _COND, _C.LINK_WORDS,
         _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(149, _X.NVLINK5, "NVLink down, or its error rate too high", _G.FATAL, "myym", _COND, _C.LINK_WORDS,
         _ACTION, _HARDWARE, _A.CHECK_LINKS),
    _row(154, _X.META, "the driver requests a recovery action", _G.BY_TEXT, "tttn", _COND, _C.ANNOUNCES,
         _ACTION, _DRIVER, _A.FOLLOW_ACTION),
    _row(155, _X.NVLINK, "software brought NVLink down", _G.ERROR, "nyym", _COND, _C.LINKS_DOWN,
         Cure.LINKS_UP, _SETUP, _A.CHECK_LINKS),
    _row(156, _X.MEMORY, "a faulty resource retires at the next reset", _G.ERROR, "nyyn", _COND,
         _C.RESET_PENDING, Cure.NOTHING_PENDING, _HARDWARE, _A.RESET_GPU),
    _row(159, _X.C2C, "fault of the coherent interface", _G.WARN, "myyn", _COND, _C.RECOVERY_ACTION,
         _ACTION, _HARDWARE, _A.FOLLOW_ACTION),
    _row(166, _X.NVLINK, "encrypted NVLink traffic before the link was set up", _G.ERROR, "myyn", _COND,
         _C.RECOVERY_ACTION, _ACTION, _SETUP, _A.FOLLOW_ACTION),
    _row(168, _X.MEMORY, "bad memory in a protected region, capacity cut", _G.ERROR, "nmym", _COND,
         _C.CAPACITY_CUT, _ACTION, _HARDWARE, _A.ENABLE_ECC),
    _row(170, _X.NVLINK, "interrupt of an encrypted NVLink", _G.WARN, "myyn", _COND, _C.RECOVERY_ACTION,
         _ACTION, _SETUP, _A.FOLLOW_ACTION),
    _row(171, _X.MEMORY, "uncorrectable error in DRAM", _G.ERROR, "nyym", _COND, _C.DRAM_OF_48,
         _ACTION, _HARDWARE, _A.RESET_GPU),
    _row(172, _X.MEMORY, "uncorrectable error in SRAM", _G.ERROR, "nyym", _COND, _C.SRAM_OF_48,
         _ACTION, _HARDWARE, _A.RESET_GPU),
)

NEVER: Final = (
    # --- caused by a program
    _row(8, _X.APP, "a channel made no progress in time", _G.WARN, "yyyn", _NO, _C.PLAIN,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(11, _X.APP, "bad command stream for the graphics engine", _G.WARN, "yyyn", _NO, _C.PLAIN,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(13, _X.APP, "a kernel or shader faulted", _G.WARN, "yyyn", _NO, _C.SAME_PLACE,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(25, _X.APP, "illegal command stream", _G.WARN, "yyyn", _NO, _C.PLAIN,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(31, _X.APP, "memory page fault", _G.WARN, "yyyn", _NO, _C.ACROSS_WORKLOADS,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(32, _X.APP, "corrupt commands fetched by DMA", _G.ERROR, "yyyn", _NO, _C.WITH_REPLAYS,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(43, _X.APP, "a program's channel was torn down", _G.INFO, "----", _NO, _C.PLAIN,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(45, _X.APP, "a channel was cleaned up after another fault", _G.INFO, "y---", _NO, _C.FOLLOWER,
         _EXPIRES, _WORKLOAD, _A.FIND_ROOT),
    _row(69, _X.APP, "wrong object class on the graphics engine", _G.WARN, "yyyn", _NO, _C.PLAIN,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(80, _X.APP, "pushed commands failed their checksum", _G.ERROR, "yyyn", _NO, _C.ON_REPEAT,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(108, _X.NVLINK, "a remote address was not translated", _G.INFO, "----", _NO, _C.PLAIN,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(137, _X.NVLINK, "illegal access to a peer's memory over NVLink", _G.WARN, "----", _NO, _C.PLAIN,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    _row(141, _X.APP, "CUDA fast-path channel fault", _G.WARN, "----", _NO, _C.PLAIN,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    *_program(_X.APP, "copy engine", 39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)),
    _row(60, _X.MEDIA, "SEC2 or video processor fault", _G.WARN, "yyyn", _NO, _C.PLAIN,
         _EXPIRES, _WORKLOAD, _A.CHECK_WORKLOAD),
    *(row._replace(condition=_C.REQUESTED_ONLY) for row in _program(_X.MEDIA, "video decoder", 68)),
    *_program(_X.MEDIA, "video decoder", 83, 84, 88, 89, 96, 97, 98, first=1),
    *_program(_X.MEDIA, "JPEG engine", 82, *range(99, 106)),
    *_program(_X.MEDIA, "optical-flow engine", 86, 139),
    # --- caused by the driver or its firmware
    _row(37, _X.FIRMWARE, "context-switch firmware got an unknown method", _G.INFO, "----", _NO, _C.PLAIN,
         _EXPIRES, _DRIVER, _A.NOTHING),
    _row(38, _X.FIRMWARE, "watchdog of the context-switch firmware", _G.WARN, "----", _NO, _C.REQUESTED_ONLY,
         _EXPIRES, _DRIVER, _A.WATCH),
    _row(44, _X.FIRMWARE, "graphics fault during a context switch", _G.WARN, "----", _NO, _C.REQUESTED_ONLY,
         _EXPIRES, _DRIVER, _A.WATCH),
    _row(66, _X.HOST, "illegal register access by the driver", _G.INFO, "----", _NO, _C.PLAIN,
         _EXPIRES, _DRIVER, _A.NOTHING),
    _row(67, _X.HOST, "driver violation in the context-switch unit", _G.INFO, "----", _NO, _C.PLAIN,
         _EXPIRES, _DRIVER, _A.NOTHING),
    # --- caused by the configuration
    _row(14, _X.HOST, "fault injected for a test", _G.INFO, "----", _NO, _C.PLAIN,
         _EXPIRES, _SETUP, _A.NOTHING),
    _row(78, _X.HOST, "a vGPU could not start: guest and host do not match", _G.ERROR, "nnnn", _NO, _C.PLAIN,
         _EXPIRES, _SETUP, _A.MATCH_DRIVERS),
    _row(106, _X.HOST, "test message of out-of-band management", _G.INFO, "----", _NO, _C.PLAIN,
         _EXPIRES, _SETUP, _A.NOTHING),
    _row(107, _X.HOST, "silent test message of out-of-band management", _G.INFO, "----", _NO, _C.PLAIN,
         _EXPIRES, _SETUP, _A.NOTHING),
    # --- caused by hardware that still works
    _row(92, _X.MEMORY, "many one-bit memory errors", _G.WARN, "----", _NO, _C.PLAIN,
         _EXPIRES, _HARDWARE, _A.WATCH),
    _row(93, _X.MEMORY, "too many writes to the InfoROM", _G.INFO, "----", _NO, _C.PLAIN,
         _EXPIRES, _HARDWARE, _A.NOTHING),
    _row(121, _X.C2C, "corrected errors of the chip-to-chip link", _G.WARN, "----", _NO, _C.PLAIN,
         _EXPIRES, _HARDWARE, _A.RESET_LATER),
    _row(147, _X.NVLINK5, "NVLink TREX event", _G.WARN, "----", _NO, _C.LINK_WORDS,
         _EXPIRES, _HARDWARE, _A.WATCH),
    _row(148, _X.NVLINK5, "NVLink NVLPW event", _G.WARN, "----", _NO, _C.LINK_WORDS,
         _EXPIRES, _HARDWARE, _A.WATCH),
    _row(157, _X.MEMORY, "nothing is left to retire", _G.WARN, "-nnm", _NO, _C.ALWAYS_DEGRADED,
         _RESET, _HARDWARE, _A.PLAN_REPLACE),
    _row(160, _X.MEMORY, "a memory channel was retired", _G.INFO, "-yyn", _NO, _C.PLAIN,
         _EXPIRES, _HARDWARE, _A.WATCH),
    _row(161, _X.MEMORY, "a memory channel could not be retired", _G.WARN, "-nnm", _NO, _C.ALWAYS_DEGRADED,
         _RESET, _HARDWARE, _A.PLAN_REPLACE),
    _row(162, _X.POWER, "power smoothing works again", _G.INFO, "----", _NO, _C.PLAIN,
         _EXPIRES, _HARDWARE, _A.NOTHING),
    _row(163, _X.POWER, "power smoothing switched off by heat or timeout", _G.WARN, "nyyn", _NO, _C.CANCELLED,
         _RESET, _HARDWARE, _A.CHECK_COOLING),
    _row(164, _X.POWER, "power smoothing is nearly worn out", _G.WARN, "nnny", _NO, _C.ALWAYS_DEGRADED,
         Cure.REPLACE, _HARDWARE, _A.PLAN_REPLACE),
    _row(165, _X.POWER, "power smoothing is worn out", _G.WARN, "nnny", _NO, _C.ALWAYS_DEGRADED,
         Cure.REPLACE, _HARDWARE, _A.PLAN_REPLACE),
)

_RETIRED: Final = {
    1: "channel FIFO fault", 2: "FIFO software method fault", 3: "unknown FIFO method", 4: "FIFO busy",
    5: "FIFO ran out", 6: "FIFO parse fault", 7: "FIFO page-table fault", 9: "graphics instance fault",
    10: "single-step fault", 12: "graphics software method fault", 15: "display scanline timeout",
    16: "display vblank callback late", 17: "channel parameter fault", 18: "bus-master wait expired",
    19: "display notifier missed", 20: "MPEG engine fault", 21: "motion-estimation engine fault",
    22: "video processor method fault", 23: "channel logging marker", 24: "graphics semaphore wait expired",
    26: "frame-buffer interface wait expired", 27: "video engine fault", 28: "video engine 2 fault",
    29: "bitstream engine fault", 30: "bad register access", 33: "security engine fault",
    34: "VLD decoder fault", 35: "picture decoder fault", 36: "post-processor fault",
    42: "image compositor fault", 47: "video encoder 0 fault", 49: "power-saving level set by registry",
    50: "power-saving level changed after a fault", 51: "power-saving stress test failed",
    52: "power-saving level changed by heat", 53: "clocks lowered by heat",
    55: "temperature sensor read failed", 56: "display channel fault", 57: "memory link training failed",
    58: "frame-buffer memory fault", 59: "power controller fault", 61: "power controller breakpoint",
    65: "video encoder 1 fault", 73: "video encoder 2 fault", 81: "VGA subsystem fault",
    87: "telemetry report marker", 90: "L2 cache fault", 91: "reserved", 111: "display bundle fault",
    112: "display supervisor fault", 113: "DisplayPort training failed", 114: "display head underflow",
    115: "display core channel register fault", 116: "display window channel fault",
    117: "cursor channel fault", 118: "display head register fault", 122: "SPI flash read failed",
    123: "SPI flash write failed", 124: "SPI flash erase failed", 125: "InfoROM file system fault",
    138: "deep-learning accelerator fault", 152: "deep-learning accelerator SMMU fault",
    153: "deep-learning accelerator timeout",
}
_RETIRED_HARMLESS: Final = (152, 153)  # NVIDIA's catalog states that nothing is needed

RETIRED: Final = tuple(
    _row(code, _X.UNUSED, meaning, _G.INFO, "----" if code in _RETIRED_HARMLESS else "????", _COND,
         _C.RETIRED, _ACTION, _DRIVER, _A.FOLLOW_ACTION)
    for code, meaning in _RETIRED.items()
)
# fmt: on

XIDS: Final = {row.code: row for row in sorted((*ALWAYS, *CONDITIONAL, *NEVER, *RETIRED))}
"""Table rows by XID number, in ascending order."""

CANCELS: Final = {162: 163}
"""XID that reports the end of an earlier XID, by the earlier XID."""


def row_of(code: int) -> XidRow:
    """Return the table row of an XID; an XID that is not listed gets a row that is not benign."""
    return XIDS.get(code) or XidRow(
        code, XidClass.META, "unknown to this version", XidGrade.WARN, parse_repairs("????"),
        XidEffect.CONDITIONAL, XidCondition.UNLISTED, Cure.ACTION, Blame.DRIVER, XidAdvice.FOLLOW_ACTION,
    )  # fmt: skip
