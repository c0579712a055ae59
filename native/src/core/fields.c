/* fields.c - the kernel's names of the fields, for messages. */
#include "drahealth.h"

static const char *const names[DH_FIELD_NUM] = {
    [DH_CPU_PRESENT] = "cpu/present",
    [DH_CPU_ONLINE] = "cpu/online",
    [DH_CPU_ISOLATED] = "cpu/isolated",
    [DH_NODE_CPUS] = "cpulist",
    [DH_NODE_THROTTLE_CORE] = "core_throttle_count",
    [DH_NODE_THROTTLE_PACKAGE] = "package_throttle_count",
    [DH_POOL_NR] = "nr_hugepages",
    [DH_POOL_FREE] = "free_hugepages",
    [DH_POOL_RESERVED] = "resv_hugepages",
    [DH_POOL_SURPLUS] = "surplus_hugepages",
    [DH_POOL_OVERCOMMIT] = "nr_overcommit_hugepages",
    [DH_GROUP_SET] = "kubepods",
    [DH_GROUP_POPULATED] = "cgroup.events populated",
    [DH_GROUP_FROZEN] = "cgroup.events frozen",
    [DH_GROUP_MEM_HIGH] = "memory.events high",
    [DH_GROUP_MEM_MAX] = "memory.events max",
    [DH_GROUP_MEM_OOM] = "memory.events oom",
    [DH_GROUP_MEM_OOM_KILL] = "oom_kill",
    [DH_GROUP_MEM_FAILCNT] = "memory.failcnt",
    [DH_GROUP_CPU_PERIODS] = "cpu.stat nr_periods",
    [DH_GROUP_CPU_THROTTLED] = "cpu.stat nr_throttled",
    [DH_GROUP_HT_MAX] = "hugetlb max",
    [DH_GROUP_HT_RSVD_MAX] = "hugetlb rsvd.max",
    [DH_GROUP_HT_EVENTS] = "hugetlb events",
    [DH_GROUP_HT_RSVD_FAILED] = "hugetlb rsvd.failcnt",
    [DH_GROUP_MEM_LIMIT] = "memory limit",
    [DH_GROUP_CPUS] = "cpuset.cpus.effective",
    [DH_SYSFS] = "sysfs root",
    [DH_CGROUPFS] = "cgroupfs root",
};

const char *dh_field_name(uint32_t field)
{
    return field < DH_FIELD_NUM ? names[field] : 0;
}
