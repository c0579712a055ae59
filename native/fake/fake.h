/*
 * fake.h - a libnvidia-ml.so.1 without a GPU: declarations shared by its files.
 *
 *   profiles.c    tables of the GPUs that can be simulated
 *   machine.c     the GPUs of this process, and their changes
 *   gate.c        checks that every call on a GPU passes: session, handle, hang, failure, loss
 *   session.c identity.c sensors.c memory.c links.c fields.c mig.c events.c    NVML's functions by theme
 *   command.c     parser of a scenario's line; command.h its result, tokens.c its tokens
 *   execute.c     executes a command
 *   director.c    the scenario file, its timeline and storms, and the control socket
 *
 * One lock guards everything. No call holds it while it hangs, is slow, or waits for an event.
 * docs/fake-nvml.md documents the language, and what here is known of the real library and what is a guess.
 */
#ifndef FAKE_H
#define FAKE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "gpu/nvml.h"

#ifndef FAKE_BRANCH
#define FAKE_BRANCH 580
#endif

#define FAKE_GPUS 40 /* more than the agent has records for */
#define FAKE_MIGS 7
#define FAKE_LINKS 18
#define FAKE_FIELDS 320
#define FAKE_SETS 16
#define FAKE_EVENTS 1024 /* events of one set that were not fetched yet */
#define FAKE_NONE INT64_MIN /* the GPU does not support it: NVML_ERROR_NOT_SUPPORTED */
#define FAKE_WHOLE_GPU 0xffffffffu
#define FAKE_NS 1000000000ull

/* Effect of a GPU reset on a quantity. */
enum fake_fate {
    FAKE_KEPT,
    FAKE_CLEARED, /* becomes 0 */
    FAKE_COUNTED  /* becomes 0; additions also count for the next quantity, its lifetime count */
};

/* X(enumerator, name in a scenario, fate, value of an h100); profiles.c has the differences of other GPUs. */
#define FAKE_QUANTITIES(X) \
    X(PERSISTENCE, "persistence", FAKE_KEPT, 1) \
    X(PROCESSES, "processes", FAKE_CLEARED, 0) \
    X(NUMA_NODE, "numa.node", FAKE_KEPT, FAKE_NONE) \
    X(PSTATE, "pstate", FAKE_KEPT, 0) \
    X(POWER_USAGE, "power.usage", FAKE_KEPT, 71000) \
    X(POWER_LIMIT, "power.limit", FAKE_KEPT, 700000) \
    X(POWER_SMOOTHING, "power.smoothing", FAKE_KEPT, FAKE_NONE) \
    X(UTILIZATION_GPU, "utilization.gpu", FAKE_KEPT, 0) \
    X(UTILIZATION_MEMORY, "utilization.memory", FAKE_KEPT, 0) \
    X(TEMPERATURE, "temperature", FAKE_KEPT, 33) \
    X(TEMPERATURE_MEMORY, "temperature.memory", FAKE_KEPT, 45) \
    X(TEMPERATURE_MARGIN, "temperature.margin", FAKE_KEPT, 54) \
    X(TEMPERATURE_SHUTDOWN, "temperature.shutdown", FAKE_KEPT, 95) \
    X(TEMPERATURE_SLOWDOWN, "temperature.slowdown", FAKE_KEPT, 89) \
    X(TEMPERATURE_MEMORY_MAX, "temperature.memory_max", FAKE_KEPT, 95) \
    X(TEMPERATURE_GPU_MAX, "temperature.gpu_max", FAKE_KEPT, 87) \
    X(TLIMIT_SHUTDOWN, "tlimit.shutdown", FAKE_KEPT, -8) \
    X(TLIMIT_SLOWDOWN, "tlimit.slowdown", FAKE_KEPT, -2) \
    X(TLIMIT_MEMORY_MAX, "tlimit.memory_max", FAKE_KEPT, 0) \
    X(TLIMIT_GPU_MAX, "tlimit.gpu_max", FAKE_KEPT, 0) \
    X(CLOCKS_REASONS, "clocks.reasons", FAKE_CLEARED, 1) \
    X(POLICY_POWER, "policy.power", FAKE_CLEARED, 0) \
    X(POLICY_THERMAL, "policy.thermal", FAKE_CLEARED, 0) \
    X(POLICY_SYNC_BOOST, "policy.sync_boost", FAKE_CLEARED, 0) \
    X(POLICY_BOARD_LIMIT, "policy.board_limit", FAKE_CLEARED, 0) \
    X(POLICY_LOW_UTILIZATION, "policy.low_utilization", FAKE_CLEARED, 0) \
    X(POLICY_RELIABILITY, "policy.reliability", FAKE_CLEARED, 0) \
    X(POLICY_APP_CLOCKS, "policy.app_clocks", FAKE_CLEARED, 0) \
    X(POLICY_BASE_CLOCKS, "policy.base_clocks", FAKE_CLEARED, 0) \
    X(THROTTLE_SW_THERMAL, "throttle.sw_thermal", FAKE_CLEARED, 0) \
    X(THROTTLE_HW_THERMAL, "throttle.hw_thermal", FAKE_CLEARED, 0) \
    X(THROTTLE_POWER_BRAKE, "throttle.power_brake", FAKE_CLEARED, 0) \
    X(PCIE_GEN, "pcie.gen", FAKE_KEPT, 5) \
    X(PCIE_GEN_MAX, "pcie.gen_max", FAKE_KEPT, 5) \
    X(PCIE_WIDTH, "pcie.width", FAKE_KEPT, 16) \
    X(PCIE_WIDTH_MAX, "pcie.width_max", FAKE_KEPT, 16) \
    X(PCIE_REPLAY, "pcie.replay", FAKE_CLEARED, 0) \
    X(PCIE_REPLAY_ROLLOVER, "pcie.replay_rollover", FAKE_CLEARED, 0) \
    X(PCIE_L0_TO_RECOVERY, "pcie.l0_to_recovery", FAKE_CLEARED, 0) \
    X(PCIE_CORRECTABLE, "pcie.correctable", FAKE_CLEARED, 0) \
    X(PCIE_NAKS_RECEIVED, "pcie.naks_received", FAKE_CLEARED, 0) \
    X(PCIE_RECEIVER_ERROR, "pcie.receiver_error", FAKE_CLEARED, 0) \
    X(PCIE_BAD_TLP, "pcie.bad_tlp", FAKE_CLEARED, 0) \
    X(PCIE_NAKS_SENT, "pcie.naks_sent", FAKE_CLEARED, 0) \
    X(PCIE_BAD_DLLP, "pcie.bad_dllp", FAKE_CLEARED, 0) \
    X(PCIE_NON_FATAL, "pcie.non_fatal", FAKE_CLEARED, 0) \
    X(PCIE_FATAL, "pcie.fatal", FAKE_CLEARED, 0) \
    X(PCIE_UNSUPPORTED_REQUEST, "pcie.unsupported_request", FAKE_CLEARED, 0) \
    X(PCIE_LCRC_ERROR, "pcie.lcrc_error", FAKE_CLEARED, 0) \
    X(PCIE_LANE_ERROR, "pcie.lane_error", FAKE_CLEARED, 0) \
    X(ECC_MODE, "ecc.mode", FAKE_KEPT, 1) \
    X(ECC_MODE_PENDING, "ecc.mode_pending", FAKE_KEPT, 1) \
    X(DRAM_CORRECTABLE, "ecc.dram.correctable.volatile", FAKE_COUNTED, 0) \
    X(DRAM_CORRECTABLE_EVER, "ecc.dram.correctable.aggregate", FAKE_KEPT, 0) \
    X(DRAM_UNCORRECTABLE, "ecc.dram.uncorrectable.volatile", FAKE_COUNTED, 0) \
    X(DRAM_UNCORRECTABLE_EVER, "ecc.dram.uncorrectable.aggregate", FAKE_KEPT, 0) \
    X(SRAM_CORRECTABLE, "ecc.sram.correctable.volatile", FAKE_COUNTED, 0) \
    X(SRAM_CORRECTABLE_EVER, "ecc.sram.correctable.aggregate", FAKE_KEPT, 0) \
    X(SRAM_UNCORRECTABLE, "ecc.sram.uncorrectable.volatile", FAKE_COUNTED, 0) \
    X(SRAM_UNCORRECTABLE_EVER, "ecc.sram.uncorrectable.aggregate", FAKE_KEPT, 0) \
    X(SRAM_PARITY, "ecc.sram.parity.volatile", FAKE_CLEARED, 0) \
    X(SRAM_SECDED, "ecc.sram.secded.volatile", FAKE_CLEARED, 0) \
    X(SRAM_THRESHOLD, "ecc.sram.threshold", FAKE_KEPT, 0) \
    X(REMAP_CORRECTABLE, "remap.correctable", FAKE_KEPT, 0) \
    X(REMAP_UNCORRECTABLE, "remap.uncorrectable", FAKE_KEPT, 0) \
    X(REMAP_PENDING, "remap.pending", FAKE_CLEARED, 0) \
    X(REMAP_FAILURE, "remap.failure", FAKE_KEPT, 0) \
    X(CHANNEL_REPAIR, "repair.channel", FAKE_CLEARED, 0) \
    X(TPC_REPAIR, "repair.tpc", FAKE_CLEARED, 0) \
    X(UNREPAIRABLE, "memory.unrepairable", FAKE_KEPT, 0) \
    X(RETIRED_SBE, "retired.sbe", FAKE_KEPT, FAKE_NONE) \
    X(RETIRED_DBE, "retired.dbe", FAKE_KEPT, FAKE_NONE) \
    X(RETIRED_PENDING, "retired.pending", FAKE_CLEARED, FAKE_NONE) \
    X(RECOVERY_ACTION, "recovery_action", FAKE_CLEARED, 0) \
    X(FABRIC_STATE, "fabric.state", FAKE_KEPT, 3) \
    X(FABRIC_STATUS, "fabric.status", FAKE_KEPT, 0) \
    X(FABRIC_CLIQUE, "fabric.clique", FAKE_KEPT, 0) \
    X(FABRIC_HEALTH, "fabric.health", FAKE_KEPT, 0x1aa) \
    X(FABRIC_SUMMARY, "fabric.summary", FAKE_KEPT, 1)

/* Quantities of one NVLink, in a scenario nvlink.<link>.<name>. Rows after ecc_data exist since NVLink 5. */
#define FAKE_LINK_QUANTITIES(X) \
    X(STATE, "state", FAKE_KEPT, 1) \
    X(SPEED, "speed", FAKE_KEPT, 26562) \
    X(REPLAY, "replay", FAKE_CLEARED, 0) \
    X(RECOVERY, "recovery", FAKE_CLEARED, 0) \
    X(CRC_FLIT, "crc_flit", FAKE_CLEARED, 0) \
    X(CRC_DATA, "crc_data", FAKE_CLEARED, 0) \
    X(ECC_DATA, "ecc_data", FAKE_CLEARED, 0) \
    X(MALFORMED_PACKETS, "malformed_packets", FAKE_CLEARED, FAKE_NONE) \
    X(BUFFER_OVERRUNS, "buffer_overruns", FAKE_CLEARED, FAKE_NONE) \
    X(RECEIVE_ERRORS, "receive_errors", FAKE_CLEARED, FAKE_NONE) \
    X(RECEIVE_REMOTE_ERRORS, "receive_remote_errors", FAKE_CLEARED, FAKE_NONE) \
    X(RECEIVE_GENERAL_ERRORS, "receive_general_errors", FAKE_CLEARED, FAKE_NONE) \
    X(LINK_INTEGRITY_ERRORS, "link_integrity_errors", FAKE_CLEARED, FAKE_NONE) \
    X(TRANSMIT_DISCARDS, "transmit_discards", FAKE_CLEARED, FAKE_NONE) \
    X(RECOVERIES_DONE, "recoveries_done", FAKE_CLEARED, FAKE_NONE) \
    X(RECOVERIES_FAILED, "recoveries_failed", FAKE_CLEARED, FAKE_NONE) \
    X(RECOVERIES, "recoveries", FAKE_CLEARED, FAKE_NONE) \
    X(EFFECTIVE_ERRORS, "effective_errors", FAKE_CLEARED, FAKE_NONE) \
    X(EFFECTIVE_BER, "effective_ber", FAKE_CLEARED, FAKE_NONE) \
    X(SYMBOL_ERRORS, "symbol_errors", FAKE_CLEARED, FAKE_NONE) \
    X(SYMBOL_BER, "symbol_ber", FAKE_CLEARED, FAKE_NONE)

#define X(name, ...) Q_##name,
enum fake_quantity { FAKE_QUANTITIES(X) Q_NUM };
#undef X
#define X(name, ...) L_##name,
enum fake_link_quantity { FAKE_LINK_QUANTITIES(X) L_NUM };
#undef X
#define X(result, name, arguments) CALL_##name,
enum fake_call { NVML_FUNCTIONS(X) CALL_NUM };
#undef X
#define CALL_ALL CALL_NUM

struct fake_trait {
    const char *name;
    enum fake_fate fate;
    int64_t value;
};

struct fake_mig_profile {
    const char *name;
    uint8_t compute, memory; /* slices, of 7 and of 8 */
    uint16_t multiprocessors;
    uint32_t mib;
};

struct fake_profile {
    const char *name, *product, *vbios;
    nvmlBrandType_t brand;
    nvmlDeviceArchitecture_t architecture;
    uint32_t pci_device, pci_subsystem;
    uint8_t links;
    uint32_t link_speed;
    bool newer_events; /* events 0x200 and up: Ampere and later */
    struct { uint16_t quantity; int64_t value; } other[32]; /* difference to an h100; ends where both are 0 */
    struct fake_mig_profile mig[8];                          /* ends where the name is NULL */
};

struct fake_mig {
    const struct fake_mig_profile *profile;
    uint8_t gi;
};

struct fake_gpu {
    int64_t value[Q_NUM];
    int64_t link[FAKE_LINKS][L_NUM];
    bool lost, mig_on;
    bool nameless; /* its UUID is empty */
    uint8_t migs, partitioned; /* number of repartitionings: older handles are void */
    uint8_t part;              /* number of replacements */
    struct fake_mig mig[FAKE_MIGS];
    struct {
        bool on, holds_driver;
        enum fake_call call; /* or CALL_ALL */
        uint64_t until_ns;   /* 0: until released */
    } hang;
    uint64_t slow_ns;
    uint16_t fail_call[CALL_NUM + 1]; /* forced return codes; 0 as usual. The last one is for all calls */
    uint16_t fail_field[FAKE_FIELDS];
    uint16_t fail_link[FAKE_LINKS];
    uint64_t calls[CALL_NUM];
    uint32_t hung; /* calls that hang now, including those behind another GPU's lock */
};

struct fake_event_set {
    bool used;
    uint16_t uses; /* older handles are void */
    uint64_t types[FAKE_GPUS];
    nvmlEventData_t ring[FAKE_EVENTS];
    uint32_t first, num;
};

struct fake {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* on CLOCK_MONOTONIC: events, hangs, sessions */
    const struct fake_profile *profile;
    struct fake_gpu gpu[FAKE_GPUS];
    uint32_t gpus;
    uint32_t references;             /* nvmlInit minus nvmlShutdown */
    uint32_t driver_load, session;   /* the running driver, and the driver at the start of this session */
    uint32_t handles;                /* grows when older handles become void */
    uint32_t driver_held;            /* hanging calls that hold the driver's lock */
    uint16_t init_answer, count_answer, wait_answer;
    bool count_once; /* and afterwards as usual */
    uint32_t listed; /* GPUs that the driver lists; the others keep their handles */
    bool endless;    /* texts fill their buffers and have no end */
    bool wait_empty; /* a wait returns at once, without an event */
    uint64_t init_hangs_until_ns;
    char driver[32];
    struct fake_event_set set[FAKE_SETS];
    uint64_t start_ns; /* start of the timeline */
};

extern struct fake fake;

/* profiles.c */
extern const struct fake_trait fake_traits[Q_NUM];
extern const struct fake_trait fake_link_traits[L_NUM];
const struct fake_profile *fake_profile_find(const char *name);

/* machine.c; all under the lock */
uint64_t fake_now(void);
void fake_wait(uint64_t until_ns); /* for a change; 0 is no limit */
void fake_machine_make(const struct fake_profile *profile, uint32_t gpus);
void fake_gpu_reset(struct fake_gpu *g);
void fake_gpu_replace(struct fake_gpu *g);
void fake_driver_load(const char *version, uint32_t gpus, bool same_handles); /* NULL: version as before */
void fake_partition(struct fake_gpu *g, bool on, const struct fake_mig_profile *const *mig, uint32_t num);
void fake_add(int64_t *value, const struct fake_trait *trait, bool relative, int64_t by);

/* gate.c */
const char *fake_call_name(enum fake_call call);
nvmlDevice_t fake_handle(const struct fake_gpu *g, const struct fake_mig *m);
bool fake_in_session(void);

/*
 * Begin a call on a GPU. On NVML_SUCCESS the lock is held until fake_leave(); otherwise it is not. With @mig
 * a MIG device's handle is accepted: *mig is NULL for a GPU.
 */
nvmlReturn_t fake_enter(enum fake_call call, nvmlDevice_t device, struct fake_gpu **g, struct fake_mig **mig);
nvmlReturn_t fake_pass(enum fake_call call, struct fake_gpu *g); /* the same without a handle */
nvmlReturn_t fake_leave(nvmlReturn_t answer);
nvmlReturn_t fake_number(enum fake_call call, nvmlDevice_t device, enum fake_quantity quantity,
                         unsigned int *out);
nvmlReturn_t fake_text(char *out, unsigned int length, const char *text);

/* identity.c */
void fake_uuid(const struct fake_gpu *g, const struct fake_mig *m, char out[NVML_DEVICE_UUID_V2_BUFFER_SIZE]);
void fake_bus_id(const struct fake_gpu *g, char out[NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE]);

/* memory.c */
nvmlReturn_t fake_ecc(const struct fake_gpu *g, enum fake_quantity first, bool both, int64_t *errors);

/* events.c */
void fake_emit(struct fake_gpu *g, uint64_t type, uint64_t data, uint32_t gi, uint32_t ci);
void fake_sets_free(void);

/* director.c */
bool fake_scenario_load(const char *path); /* false, with a line on stderr, after an error */

/* Declarations of the exported functions; the rest of the library is hidden. */
#pragma GCC visibility push(default)
#define X(result, name, arguments) result name arguments;
NVML_FUNCTIONS(X)
#undef X
nvmlReturn_t nvmlInitWithFlags(unsigned int flags); /* called by pynvml */
#pragma GCC visibility pop

#endif
