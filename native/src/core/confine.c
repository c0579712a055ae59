/* confine.c - takes from a process what it does not need, before it loads a foreign library. */
#include <errno.h>
#include <linux/capability.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "drahealth.h"

#define LAST_CAP 63 /* prctl(2) reports EINVAL for the numbers above the kernel's last capability */

/*
 * Drop all capabilities but @kept, also from the set that execve(2) could give back. Without others, capset(2) is
 * left out: the filter of the systemd unit does not allow it.
 */
static int capabilities_drop(uint64_t kept)
{
    struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
    struct __user_cap_data_struct data[2];
    uint32_t others = 0;

    if (syscall(SYS_capget, &header, data) < 0)
        return -errno;
    for (int i = 0; i < 2; i++) {
        uint32_t mask = (uint32_t)(kept >> 32 * i);

        others |= data[i].inheritable | (data[i].permitted & ~mask);
        data[i].permitted &= mask;
        data[i].effective = data[i].permitted;
        data[i].inheritable = 0;
    }
    for (unsigned long cap = 0; cap <= LAST_CAP; cap++)
        if (!(kept >> cap & 1))
            prctl(PR_CAPBSET_DROP, cap, 0, 0, 0); /* EPERM without CAP_SETPCAP: no_new_privs suffices */
    return others && syscall(SYS_capset, &header, data) < 0 ? -errno : 0;
}

int dh_confine(int parent, uint64_t memory_bytes)
{
    struct rlimit memory = { .rlim_cur = memory_bytes, .rlim_max = memory_bytes }, now;
    int err;

    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0)
        return -errno;
    if (getppid() != parent)
        return -ESRCH; /* it ended before the signal was set */
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || getrlimit(RLIMIT_DATA, &now) < 0)
        return -errno;
    if (now.rlim_max < memory.rlim_max) /* an unprivileged process may not raise it */
        memory.rlim_cur = memory.rlim_max = now.rlim_max;
    if (setrlimit(RLIMIT_DATA, &memory) < 0)
        return -errno;
    err = capabilities_drop(1ull << CAP_SYS_ADMIN);
    signal(SIGINT, SIG_IGN); /* a terminal and a service manager signal all processes of the agent */
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    return err;
}
