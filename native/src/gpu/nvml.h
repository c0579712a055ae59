/*
 * nvml.h - the part of NVIDIA's management library that the core uses: numbers, layouts, signatures.
 *
 * The library is loaded at run time and may be of any age: a missing symbol marks an older driver.
 * NVML_FUNCTIONS lists every function once; the file that includes this header expands it into a table of
 * pointers for dlsym(3), or into the prototypes of the fake library in native/fake.
 *
 * Names and values are NVML's own, as in its reference manual. tests/test_fake_nvml.py checks them against
 * pynvml. Layouts are those of 64-bit Linux.
 */
#ifndef DH_NVML_H
#define DH_NVML_H

#include <stddef.h>
#include <stdint.h>

typedef struct nvmlDevice_st *nvmlDevice_t;     /* a GPU or a MIG device; opaque */
typedef struct nvmlEventSet_st *nvmlEventSet_t;

typedef enum nvmlReturn_enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_ALREADY_INITIALIZED = 5,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_INSUFFICIENT_POWER = 8,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_IRQ_ISSUE = 11,
    NVML_ERROR_LIBRARY_NOT_FOUND = 12,
    NVML_ERROR_FUNCTION_NOT_FOUND = 13,
    NVML_ERROR_CORRUPTED_INFOROM = 14,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_RESET_REQUIRED = 16,
    NVML_ERROR_OPERATING_SYSTEM = 17,
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18, /* library and kernel module are of different releases */
    NVML_ERROR_IN_USE = 19,
    NVML_ERROR_MEMORY = 20,
    NVML_ERROR_NO_DATA = 21,
    NVML_ERROR_VGPU_ECC_NOT_SUPPORTED = 22,
    NVML_ERROR_INSUFFICIENT_RESOURCES = 23,
    NVML_ERROR_FREQ_NOT_SUPPORTED = 24,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_DEPRECATED = 26,
    NVML_ERROR_NOT_READY = 27,
    NVML_ERROR_GPU_NOT_FOUND = 28,
    NVML_ERROR_INVALID_STATE = 29,
    NVML_ERROR_RESET_TYPE_NOT_SUPPORTED = 30,
    NVML_ERROR_UNKNOWN = 999
} nvmlReturn_t;

#define NVML_DEVICE_UUID_V2_BUFFER_SIZE 96
#define NVML_DEVICE_SERIAL_BUFFER_SIZE 30
#define NVML_DEVICE_NAME_V2_BUFFER_SIZE 96
#define NVML_DEVICE_VBIOS_VERSION_BUFFER_SIZE 32
#define NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE 32
#define NVML_DEVICE_PCI_BUS_ID_BUFFER_V2_SIZE 16
#define NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE 80
#define NVML_SYSTEM_NVML_VERSION_BUFFER_SIZE 80
#define NVML_NVLINK_MAX_LINKS 36 /* 18 in branches up to 580 */
#define NVML_GPU_FABRIC_UUID_LEN 16

/* In a versioned structure the caller writes this first: version and size of the structure. */
#define NVML_STRUCT_VERSION(type, version) ((unsigned int)(sizeof(type) | (unsigned int)(version) << 24))

/* Events: bits that can be registered; the driver refuses a bit that it cannot deliver. */
#define nvmlEventTypeNone 0x0ull
#define nvmlEventTypeSingleBitEccError 0x1ull
#define nvmlEventTypeDoubleBitEccError 0x2ull
#define nvmlEventTypePState 0x4ull
#define nvmlEventTypeXidCriticalError 0x8ull /* data: the XID, 999 if unknown */
#define nvmlEventTypeClock 0x10ull
#define nvmlEventTypePowerSourceChange 0x80ull
#define nvmlEventMigConfigChange 0x100ull
#define nvmlEventTypeSingleBitEccErrorStorm 0x200ull
#define nvmlEventTypeDramRetirementEvent 0x400ull
#define nvmlEventTypeDramRetirementFailure 0x800ull
#define nvmlEventTypeNonFatalPoisonError 0x1000ull
#define nvmlEventTypeFatalPoisonError 0x2000ull
#define nvmlEventTypeGpuUnavailableError 0x4000ull
#define nvmlEventTypeGpuRecoveryAction 0x8000ull

typedef struct nvmlEventData_st {
    nvmlDevice_t device;
    unsigned long long eventType;
    unsigned long long eventData;
    unsigned int gpuInstanceId; /* 0xFFFFFFFF: the fault is not tied to a partition */
    unsigned int computeInstanceId;
} nvmlEventData_t;

typedef enum nvmlEnableState_enum { NVML_FEATURE_DISABLED = 0, NVML_FEATURE_ENABLED = 1 } nvmlEnableState_t;

typedef enum nvmlBrandType_enum {
    NVML_BRAND_UNKNOWN = 0,
    NVML_BRAND_TESLA = 2,
    NVML_BRAND_NVIDIA = 14
} nvmlBrandType_t;

typedef unsigned int nvmlDeviceArchitecture_t;
#define NVML_DEVICE_ARCH_VOLTA 5u
#define NVML_DEVICE_ARCH_TURING 6u
#define NVML_DEVICE_ARCH_AMPERE 7u
#define NVML_DEVICE_ARCH_ADA 8u
#define NVML_DEVICE_ARCH_HOPPER 9u
#define NVML_DEVICE_ARCH_BLACKWELL 10u
#define NVML_DEVICE_ARCH_UNKNOWN 0xffffffffu

typedef unsigned int nvmlPstates_t; /* 0 fastest to 15 slowest */
#define NVML_PSTATE_UNKNOWN 32u

typedef struct nvmlPciInfo_st {
    char busIdLegacy[NVML_DEVICE_PCI_BUS_ID_BUFFER_V2_SIZE];
    unsigned int domain;
    unsigned int bus;
    unsigned int device;
    unsigned int pciDeviceId;
    unsigned int pciSubSystemId;
    char busId[NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE]; /* 00000000:1B:00.0 */
} nvmlPciInfo_t;

typedef struct nvmlUtilization_st {
    unsigned int gpu;    /* percent */
    unsigned int memory; /* percent of time in which memory was accessed */
} nvmlUtilization_t;

/* Memory errors */

typedef enum nvmlMemoryErrorType_enum {
    NVML_MEMORY_ERROR_TYPE_CORRECTED = 0,
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
} nvmlMemoryErrorType_t;

typedef enum nvmlEccCounterType_enum {
    NVML_VOLATILE_ECC = 0, /* since the driver was loaded or the GPU was reset */
    NVML_AGGREGATE_ECC = 1 /* over the life of the GPU */
} nvmlEccCounterType_t;

typedef enum nvmlMemoryLocation_enum {
    NVML_MEMORY_LOCATION_L1_CACHE = 0,
    NVML_MEMORY_LOCATION_L2_CACHE = 1,
    NVML_MEMORY_LOCATION_DRAM = 2,
    NVML_MEMORY_LOCATION_REGISTER_FILE = 3,
    NVML_MEMORY_LOCATION_TEXTURE_MEMORY = 4,
    NVML_MEMORY_LOCATION_TEXTURE_SHM = 5,
    NVML_MEMORY_LOCATION_CBU = 6,
    NVML_MEMORY_LOCATION_SRAM = 7
} nvmlMemoryLocation_t;

typedef struct nvmlEccSramErrorStatus_v1_st {
    unsigned int version;
    unsigned long long aggregateUncParity;
    unsigned long long aggregateUncSecDed;
    unsigned long long aggregateCor;
    unsigned long long volatileUncParity;
    unsigned long long volatileUncSecDed;
    unsigned long long volatileCor;
    unsigned long long aggregateUncBucketL2;
    unsigned long long aggregateUncBucketSm;
    unsigned long long aggregateUncBucketPcie;
    unsigned long long aggregateUncBucketMcu;
    unsigned long long aggregateUncBucketOther;
    unsigned int bThresholdExceeded;
} nvmlEccSramErrorStatus_t;
#define nvmlEccSramErrorStatus_v1 NVML_STRUCT_VERSION(nvmlEccSramErrorStatus_t, 1)

typedef struct nvmlRepairStatus_v1_st {
    unsigned int version;
    unsigned int bChannelRepairPending; /* each is completed by the next reset */
    unsigned int bTpcRepairPending;
} nvmlRepairStatus_t;
#define nvmlRepairStatus_v1 NVML_STRUCT_VERSION(nvmlRepairStatus_t, 1)

typedef struct nvmlUnrepairableMemory_v1_st {
    unsigned int version; /* pynvml has it, NVIDIA's reference of branch 590 has the flag alone */
    unsigned int unrepairableMemory;
} nvmlUnrepairableMemory_v1_t;
#define nvmlUnrepairableMemory_v1 NVML_STRUCT_VERSION(nvmlUnrepairableMemory_v1_t, 1)

typedef enum nvmlPageRetirementCause_enum {
    NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS = 0,
    NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR = 1
} nvmlPageRetirementCause_t;

/* Heat, power, clocks */

typedef enum nvmlTemperatureSensors_enum { NVML_TEMPERATURE_GPU = 0 } nvmlTemperatureSensors_t;

typedef enum nvmlTemperatureThresholds_enum {
    NVML_TEMPERATURE_THRESHOLD_SHUTDOWN = 0,
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1,
    NVML_TEMPERATURE_THRESHOLD_MEM_MAX = 2,
    NVML_TEMPERATURE_THRESHOLD_GPU_MAX = 3
} nvmlTemperatureThresholds_t;

typedef struct nvmlTemperature_v1_st {
    unsigned int version;
    nvmlTemperatureSensors_t sensorType;
    int temperature; /* degrees Celsius */
} nvmlTemperature_t;
#define nvmlTemperature_v1 NVML_STRUCT_VERSION(nvmlTemperature_t, 1)

typedef struct nvmlMarginTemperature_v1_st {
    unsigned int version;
    int marginTemperature; /* degrees to the nearest slowdown threshold */
} nvmlMarginTemperature_t;
#define nvmlMarginTemperature_v1 NVML_STRUCT_VERSION(nvmlMarginTemperature_t, 1)

#define nvmlClocksEventReasonGpuIdle 0x1ull
#define nvmlClocksEventReasonApplicationsClocksSetting 0x2ull
#define nvmlClocksEventReasonSwPowerCap 0x4ull
#define nvmlClocksEventReasonHwSlowdown 0x8ull
#define nvmlClocksEventReasonSyncBoost 0x10ull
#define nvmlClocksEventReasonSwThermalSlowdown 0x20ull
#define nvmlClocksEventReasonHwThermalSlowdown 0x40ull
#define nvmlClocksEventReasonHwPowerBrakeSlowdown 0x80ull
#define nvmlClocksEventReasonDisplayClockSetting 0x100ull

/* Links and fabric */

typedef enum nvmlNvLinkErrorCounter_enum {
    NVML_NVLINK_ERROR_DL_REPLAY = 0,
    NVML_NVLINK_ERROR_DL_RECOVERY = 1,
    NVML_NVLINK_ERROR_DL_CRC_FLIT = 2,
    NVML_NVLINK_ERROR_DL_CRC_DATA = 3,
    NVML_NVLINK_ERROR_DL_ECC_DATA = 4
} nvmlNvLinkErrorCounter_t;

typedef unsigned char nvmlGpuFabricState_t;
#define NVML_GPU_FABRIC_STATE_NOT_SUPPORTED 0
#define NVML_GPU_FABRIC_STATE_NOT_STARTED 1
#define NVML_GPU_FABRIC_STATE_IN_PROGRESS 2
#define NVML_GPU_FABRIC_STATE_COMPLETED 3 /* successfully or not: see status */

/* The health mask: two bits each, 1 true and 2 false; the configuration has four bits, 1 correct. */
#define NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW 0
#define NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_DEGRADED_BW 0x3
#define NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE 1
#define NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY 2
#define NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_ROUTE_RECOVERY 0x3
#define NVML_GPU_FABRIC_HEALTH_MASK_ROUTE_RECOVERY_TRUE 1
#define NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY 4
#define NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_ROUTE_UNHEALTHY 0x3
#define NVML_GPU_FABRIC_HEALTH_MASK_ROUTE_UNHEALTHY_TRUE 1
#define NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY 6
#define NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_ACCESS_TIMEOUT_RECOVERY 0x3
#define NVML_GPU_FABRIC_HEALTH_MASK_ACCESS_TIMEOUT_RECOVERY_TRUE 1
#define NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION 8
#define NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_INCORRECT_CONFIGURATION 0xf
#define NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE 1

#define NVML_GPU_FABRIC_HEALTH_SUMMARY_NOT_SUPPORTED 0
#define NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY 1
#define NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY 2
#define NVML_GPU_FABRIC_HEALTH_SUMMARY_LIMITED_CAPACITY 3

typedef struct nvmlGpuFabricInfo_st {
    unsigned char clusterUuid[NVML_GPU_FABRIC_UUID_LEN];
    nvmlReturn_t status; /* of the registration; meaningful once it is completed */
    unsigned int cliqueId;
    nvmlGpuFabricState_t state;
} nvmlGpuFabricInfo_t;

typedef struct nvmlGpuFabricInfo_v2_st {
    unsigned int version;
    unsigned char clusterUuid[NVML_GPU_FABRIC_UUID_LEN];
    nvmlReturn_t status;
    unsigned int cliqueId;
    nvmlGpuFabricState_t state;
    unsigned int healthMask;
} nvmlGpuFabricInfo_v2_t;
#define nvmlGpuFabricInfo_v2 NVML_STRUCT_VERSION(nvmlGpuFabricInfo_v2_t, 2)

/* Version 2 with one more member; nvmlDeviceGetGpuFabricInfoV() accepts both and reads the version. */
typedef struct nvmlGpuFabricInfo_v3_st {
    unsigned int version;
    unsigned char clusterUuid[NVML_GPU_FABRIC_UUID_LEN];
    nvmlReturn_t status;
    unsigned int cliqueId;
    nvmlGpuFabricState_t state;
    unsigned int healthMask;
    unsigned char healthSummary;
} nvmlGpuFabricInfo_v3_t;
#define nvmlGpuFabricInfo_v3 NVML_STRUCT_VERSION(nvmlGpuFabricInfo_v3_t, 3)

/* MIG and processes */

#define NVML_DEVICE_MIG_DISABLE 0
#define NVML_DEVICE_MIG_ENABLE 1

typedef struct nvmlDeviceAttributes_st {
    unsigned int multiprocessorCount;
    unsigned int sharedCopyEngineCount;
    unsigned int sharedDecoderCount;
    unsigned int sharedEncoderCount;
    unsigned int sharedJpegCount;
    unsigned int sharedOfaCount;
    unsigned int gpuInstanceSliceCount;
    unsigned int computeInstanceSliceCount;
    unsigned long long memorySizeMB; /* MiB */
} nvmlDeviceAttributes_t;

typedef struct nvmlProcessInfo_st {
    unsigned int pid;
    unsigned long long usedGpuMemory; /* bytes */
    unsigned int gpuInstanceId;
    unsigned int computeInstanceId;
} nvmlProcessInfo_t;

/* Field values: many numbers in one call */

typedef enum nvmlValueType_enum {
    NVML_VALUE_TYPE_DOUBLE = 0,
    NVML_VALUE_TYPE_UNSIGNED_INT = 1,
    NVML_VALUE_TYPE_UNSIGNED_LONG = 2,
    NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3,
    NVML_VALUE_TYPE_SIGNED_LONG_LONG = 4,
    NVML_VALUE_TYPE_SIGNED_INT = 5,
    NVML_VALUE_TYPE_UNSIGNED_SHORT = 6
} nvmlValueType_t;

typedef union nvmlValue_st {
    double dVal;
    unsigned int uiVal;
    unsigned long ulVal;
    unsigned long long ullVal;
    long long sllVal;
    int siVal;
    unsigned short usVal;
} nvmlValue_t;

typedef struct nvmlFieldValue_st {
    unsigned int fieldId;
    unsigned int scopeId;    /* for NVLink fields the link; 0xFFFFFFFF all of them */
    long long timestamp;     /* microseconds since 1970 */
    long long latencyUsec;
    nvmlValueType_t valueType;
    nvmlReturn_t nvmlReturn; /* result of this field alone */
    nvmlValue_t value;
} nvmlFieldValue_t;

enum {
    NVML_FI_DEV_ECC_CURRENT = 1,
    NVML_FI_DEV_ECC_PENDING = 2,
    NVML_FI_DEV_ECC_SBE_VOL_TOTAL = 3,
    NVML_FI_DEV_ECC_DBE_VOL_TOTAL = 4,
    NVML_FI_DEV_ECC_SBE_AGG_TOTAL = 5,
    NVML_FI_DEV_ECC_DBE_AGG_TOTAL = 6,
    NVML_FI_DEV_ECC_SBE_VOL_DEV = 11,
    NVML_FI_DEV_ECC_DBE_VOL_DEV = 12,
    NVML_FI_DEV_ECC_SBE_AGG_DEV = 22,
    NVML_FI_DEV_ECC_DBE_AGG_DEV = 23,
    NVML_FI_DEV_RETIRED_SBE = 29,
    NVML_FI_DEV_RETIRED_DBE = 30,
    NVML_FI_DEV_RETIRED_PENDING = 31,
    NVML_FI_DEV_PERF_POLICY_POWER = 74, /* 74 to 81: nanoseconds, accumulated */
    NVML_FI_DEV_PERF_POLICY_THERMAL = 75,
    NVML_FI_DEV_PERF_POLICY_SYNC_BOOST = 76,
    NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT = 77,
    NVML_FI_DEV_PERF_POLICY_LOW_UTILIZATION = 78,
    NVML_FI_DEV_PERF_POLICY_RELIABILITY = 79,
    NVML_FI_DEV_PERF_POLICY_TOTAL_APP_CLOCKS = 80,
    NVML_FI_DEV_PERF_POLICY_TOTAL_BASE_CLOCKS = 81,
    NVML_FI_DEV_MEMORY_TEMP = 82,
    NVML_FI_DEV_NVLINK_LINK_COUNT = 91,
    NVML_FI_DEV_RETIRED_PENDING_SBE = 92,
    NVML_FI_DEV_RETIRED_PENDING_DBE = 93,
    NVML_FI_DEV_PCIE_REPLAY_COUNTER = 94,
    NVML_FI_DEV_PCIE_REPLAY_ROLLOVER_COUNTER = 95,
    NVML_FI_DEV_REMAPPED_COR = 142,
    NVML_FI_DEV_REMAPPED_UNC = 143,
    NVML_FI_DEV_REMAPPED_PENDING = 144,
    NVML_FI_DEV_REMAPPED_FAILURE = 145,
    NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY = 161, /* from here to 165 the scope is the link */
    NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY = 162,
    NVML_FI_DEV_NVLINK_ERROR_DL_CRC = 163,
    NVML_FI_DEV_NVLINK_GET_SPEED = 164, /* MB/s */
    NVML_FI_DEV_NVLINK_GET_STATE = 165,
    NVML_FI_DEV_PCIE_L0_TO_RECOVERY_COUNTER = 169,
    NVML_FI_DEV_C2C_LINK_COUNT = 170,
    NVML_FI_DEV_C2C_LINK_GET_STATUS = 171,
    NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS = 173,
    NVML_FI_DEV_PCIE_COUNT_NAKS_RECEIVED = 174,
    NVML_FI_DEV_PCIE_COUNT_RECEIVER_ERROR = 175,
    NVML_FI_DEV_PCIE_COUNT_BAD_TLP = 176,
    NVML_FI_DEV_PCIE_COUNT_NAKS_SENT = 177,
    NVML_FI_DEV_PCIE_COUNT_BAD_DLLP = 178,
    NVML_FI_DEV_PCIE_COUNT_NON_FATAL_ERROR = 179,
    NVML_FI_DEV_PCIE_COUNT_FATAL_ERROR = 180,
    NVML_FI_DEV_PCIE_COUNT_UNSUPPORTED_REQ = 181,
    NVML_FI_DEV_PCIE_COUNT_LCRC_ERROR = 182,
    NVML_FI_DEV_PCIE_COUNT_LANE_ERROR = 183,
    NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT = 193, /* degrees of margin, so mostly negative */
    NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT = 194,
    NVML_FI_DEV_TEMPERATURE_MEM_MAX_TLIMIT = 195,
    NVML_FI_DEV_TEMPERATURE_GPU_MAX_TLIMIT = 196,
    NVML_FI_DEV_NVLINK_COUNT_MALFORMED_PACKET_ERRORS = 206, /* from here to 222: NVLink 5, per link */
    NVML_FI_DEV_NVLINK_COUNT_BUFFER_OVERRUN_ERRORS = 207,
    NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS = 208,
    NVML_FI_DEV_NVLINK_COUNT_RCV_REMOTE_ERRORS = 209,
    NVML_FI_DEV_NVLINK_COUNT_RCV_GENERAL_ERRORS = 210,
    NVML_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS = 211,
    NVML_FI_DEV_NVLINK_COUNT_XMIT_DISCARDS = 212,
    NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS = 213,
    NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS = 214,
    NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS = 215,
    NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS = 219,
    NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER = 220,
    NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS = 221,
    NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER = 222,
    NVML_FI_DEV_RESET_STATUS = 226, /* predecessors of 230 */
    NVML_FI_DEV_DRAIN_AND_RESET_STATUS = 227,
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230,
    NVML_FI_DEV_C2C_LINK_ERROR_INTR = 231,
    NVML_FI_DEV_C2C_LINK_ERROR_REPLAY = 232,
    NVML_FI_DEV_C2C_LINK_ERROR_REPLAY_B2B = 233,
    NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN = 269, /* 269 to 271: nanoseconds, accumulated */
    NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN = 270,
    NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN = 271,
    NVML_FI_DEV_REMAPPED_ROWS_COR_INACTIVE = 301,
    NVML_FI_DEV_REMAPPED_ROWS_UNC_INACTIVE = 302
};

/*
 * Only branch 575 had the three throttle times where 570 and 580 have power smoothing (by the headers of CUDA
 * 12.8, 12.9 and 13.0); 570 and older have no such fields.
 */
enum {
    NVML_R575_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN = 251,
    NVML_R575_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN = 252,
    NVML_R575_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN = 253
};

typedef enum nvmlDeviceGpuRecoveryAction_s { /* of field 230; 580 and older end at 4 */
    NVML_GPU_RECOVERY_ACTION_NONE = 0,
    NVML_GPU_RECOVERY_ACTION_GPU_RESET = 1,
    NVML_GPU_RECOVERY_ACTION_NODE_REBOOT = 2,
    NVML_GPU_RECOVERY_ACTION_DRAIN_P2P = 3,
    NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET = 4,
    NVML_GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN = 5,
    NVML_GPU_RECOVERY_ACTION_BUS_RESET = 6,
    NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT = 7
} nvmlDeviceGpuRecoveryAction_t;

_Static_assert(sizeof(nvmlEventData_t) == 32 && sizeof(nvmlPciInfo_t) == 68 &&
                   sizeof(nvmlUtilization_t) == 8 && sizeof(nvmlEccSramErrorStatus_t) == 104 &&
                   sizeof(nvmlRepairStatus_t) == 12 && sizeof(nvmlUnrepairableMemory_v1_t) == 8 &&
                   sizeof(nvmlTemperature_t) == 12 && sizeof(nvmlMarginTemperature_t) == 8 &&
                   sizeof(nvmlGpuFabricInfo_t) == 28 && sizeof(nvmlGpuFabricInfo_v2_t) == 36 &&
                   sizeof(nvmlGpuFabricInfo_v3_t) == 40 && sizeof(nvmlDeviceAttributes_t) == 40 &&
                   sizeof(nvmlProcessInfo_t) == 24 && sizeof(nvmlFieldValue_t) == 40,
               "NVML's structures on 64-bit Linux");

/* X(result, name, parameters): by theme, a newer function before the one that it replaces. */
#define NVML_FUNCTIONS(X) \
    X(nvmlReturn_t, nvmlInit_v2, (void)) \
    X(nvmlReturn_t, nvmlShutdown, (void)) \
    X(const char *, nvmlErrorString, (nvmlReturn_t result)) \
    X(nvmlReturn_t, nvmlSystemGetDriverVersion, (char *version, unsigned int length)) \
    X(nvmlReturn_t, nvmlSystemGetNVMLVersion, (char *version, unsigned int length)) \
    X(nvmlReturn_t, nvmlDeviceGetCount_v2, (unsigned int *count)) \
    X(nvmlReturn_t, nvmlDeviceGetHandleByIndex_v2, (unsigned int index, nvmlDevice_t *device)) \
    X(nvmlReturn_t, nvmlDeviceGetHandleByUUID, (const char *uuid, nvmlDevice_t *device)) \
    X(nvmlReturn_t, nvmlDeviceGetHandleByPciBusId_v2, (const char *bus_id, nvmlDevice_t *device)) \
    X(nvmlReturn_t, nvmlDeviceGetIndex, (nvmlDevice_t device, unsigned int *index)) \
    X(nvmlReturn_t, nvmlDeviceGetUUID, (nvmlDevice_t device, char *uuid, unsigned int length)) \
    X(nvmlReturn_t, nvmlDeviceGetSerial, (nvmlDevice_t device, char *serial, unsigned int length)) \
    X(nvmlReturn_t, nvmlDeviceGetName, (nvmlDevice_t device, char *name, unsigned int length)) \
    X(nvmlReturn_t, nvmlDeviceGetBrand, (nvmlDevice_t device, nvmlBrandType_t *brand)) \
    X(nvmlReturn_t, nvmlDeviceGetArchitecture, (nvmlDevice_t device, nvmlDeviceArchitecture_t *arch)) \
    X(nvmlReturn_t, nvmlDeviceGetMinorNumber, (nvmlDevice_t device, unsigned int *minor)) \
    X(nvmlReturn_t, nvmlDeviceGetPciInfo_v3, (nvmlDevice_t device, nvmlPciInfo_t *pci)) \
    X(nvmlReturn_t, nvmlDeviceGetNumaNodeId, (nvmlDevice_t device, unsigned int *node)) \
    X(nvmlReturn_t, nvmlDeviceGetVbiosVersion, (nvmlDevice_t device, char *version, unsigned int length)) \
    X(nvmlReturn_t, nvmlDeviceGetPersistenceMode, (nvmlDevice_t device, nvmlEnableState_t *mode)) \
    X(nvmlReturn_t, nvmlDeviceGetEccMode, \
      (nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending)) \
    X(nvmlReturn_t, nvmlDeviceGetTotalEccErrors, \
      (nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter, \
       unsigned long long *errors)) \
    X(nvmlReturn_t, nvmlDeviceGetMemoryErrorCounter, \
      (nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter, \
       nvmlMemoryLocation_t location, unsigned long long *errors)) \
    X(nvmlReturn_t, nvmlDeviceGetSramEccErrorStatus, \
      (nvmlDevice_t device, nvmlEccSramErrorStatus_t *status)) \
    X(nvmlReturn_t, nvmlDeviceGetRepairStatus, (nvmlDevice_t device, nvmlRepairStatus_t *status)) \
    X(nvmlReturn_t, nvmlDeviceGetUnrepairableMemoryFlag_v1, \
      (nvmlDevice_t device, nvmlUnrepairableMemory_v1_t *status)) \
    X(nvmlReturn_t, nvmlDeviceGetRemappedRows, \
      (nvmlDevice_t device, unsigned int *correctable, unsigned int *uncorrectable, unsigned int *pending, \
       unsigned int *failure)) \
    X(nvmlReturn_t, nvmlDeviceGetRetiredPages_v2, \
      (nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned int *count, \
       unsigned long long *addresses, unsigned long long *times)) \
    X(nvmlReturn_t, nvmlDeviceGetRetiredPages, \
      (nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned int *count, \
       unsigned long long *addresses)) \
    X(nvmlReturn_t, nvmlDeviceGetRetiredPagesPendingStatus, \
      (nvmlDevice_t device, nvmlEnableState_t *pending)) \
    X(nvmlReturn_t, nvmlDeviceGetTemperatureV, (nvmlDevice_t device, nvmlTemperature_t *temperature)) \
    X(nvmlReturn_t, nvmlDeviceGetTemperature, \
      (nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *temperature)) \
    X(nvmlReturn_t, nvmlDeviceGetTemperatureThreshold, \
      (nvmlDevice_t device, nvmlTemperatureThresholds_t threshold, unsigned int *temperature)) \
    X(nvmlReturn_t, nvmlDeviceGetMarginTemperature, (nvmlDevice_t device, nvmlMarginTemperature_t *margin)) \
    X(nvmlReturn_t, nvmlDeviceGetCurrentClocksEventReasons, \
      (nvmlDevice_t device, unsigned long long *reasons)) \
    X(nvmlReturn_t, nvmlDeviceGetCurrentClocksThrottleReasons, \
      (nvmlDevice_t device, unsigned long long *reasons)) \
    X(nvmlReturn_t, nvmlDeviceGetPowerUsage, (nvmlDevice_t device, unsigned int *milliwatts)) \
    X(nvmlReturn_t, nvmlDeviceGetEnforcedPowerLimit, (nvmlDevice_t device, unsigned int *milliwatts)) \
    X(nvmlReturn_t, nvmlDeviceGetPerformanceState, (nvmlDevice_t device, nvmlPstates_t *state)) \
    X(nvmlReturn_t, nvmlDeviceGetUtilizationRates, (nvmlDevice_t device, nvmlUtilization_t *utilization)) \
    X(nvmlReturn_t, nvmlDeviceGetCurrPcieLinkGeneration, (nvmlDevice_t device, unsigned int *generation)) \
    X(nvmlReturn_t, nvmlDeviceGetCurrPcieLinkWidth, (nvmlDevice_t device, unsigned int *lanes)) \
    X(nvmlReturn_t, nvmlDeviceGetMaxPcieLinkGeneration, (nvmlDevice_t device, unsigned int *generation)) \
    X(nvmlReturn_t, nvmlDeviceGetMaxPcieLinkWidth, (nvmlDevice_t device, unsigned int *lanes)) \
    X(nvmlReturn_t, nvmlDeviceGetPcieReplayCounter, (nvmlDevice_t device, unsigned int *replays)) \
    X(nvmlReturn_t, nvmlDeviceGetNvLinkState, \
      (nvmlDevice_t device, unsigned int link, nvmlEnableState_t *active)) \
    X(nvmlReturn_t, nvmlDeviceGetNvLinkErrorCounter, \
      (nvmlDevice_t device, unsigned int link, nvmlNvLinkErrorCounter_t counter, \
       unsigned long long *errors)) \
    X(nvmlReturn_t, nvmlDeviceGetGpuFabricInfoV, (nvmlDevice_t device, nvmlGpuFabricInfo_v2_t *info)) \
    X(nvmlReturn_t, nvmlDeviceGetGpuFabricInfo, (nvmlDevice_t device, nvmlGpuFabricInfo_t *info)) \
    X(nvmlReturn_t, nvmlDeviceGetFieldValues, (nvmlDevice_t device, int count, nvmlFieldValue_t *values)) \
    X(nvmlReturn_t, nvmlDeviceGetMigMode, \
      (nvmlDevice_t device, unsigned int *current, unsigned int *pending)) \
    X(nvmlReturn_t, nvmlDeviceGetMaxMigDeviceCount, (nvmlDevice_t device, unsigned int *count)) \
    X(nvmlReturn_t, nvmlDeviceGetMigDeviceHandleByIndex, \
      (nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig)) \
    X(nvmlReturn_t, nvmlDeviceIsMigDeviceHandle, (nvmlDevice_t device, unsigned int *is_mig)) \
    X(nvmlReturn_t, nvmlDeviceGetGpuInstanceId, (nvmlDevice_t mig, unsigned int *id)) \
    X(nvmlReturn_t, nvmlDeviceGetComputeInstanceId, (nvmlDevice_t mig, unsigned int *id)) \
    X(nvmlReturn_t, nvmlDeviceGetDeviceHandleFromMigDeviceHandle, (nvmlDevice_t mig, nvmlDevice_t *device)) \
    X(nvmlReturn_t, nvmlDeviceGetAttributes_v2, (nvmlDevice_t mig, nvmlDeviceAttributes_t *attributes)) \
    X(nvmlReturn_t, nvmlDeviceGetComputeRunningProcesses_v3, \
      (nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *processes)) \
    X(nvmlReturn_t, nvmlEventSetCreate, (nvmlEventSet_t *set)) \
    X(nvmlReturn_t, nvmlDeviceGetSupportedEventTypes, (nvmlDevice_t device, unsigned long long *types)) \
    X(nvmlReturn_t, nvmlDeviceRegisterEvents, \
      (nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)) \
    X(nvmlReturn_t, nvmlEventSetWait_v2, \
      (nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)) \
    X(nvmlReturn_t, nvmlEventSetFree, (nvmlEventSet_t set))

#endif
