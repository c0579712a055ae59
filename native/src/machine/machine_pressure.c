/*
 * machine_pressure.c - reads how long tasks have waited for CPUs, memory and storage.
 *
 * Source: /proc/pressure/{cpu,memory,io}, absent if the kernel was built or booted without PSI.
 *
 * The files are read periodically. A trigger, if the kernel grants one, reports at once that all tasks waited
 * for memory or storage for a twentieth of two seconds (Documentation/accounting/psi.rst). It costs nothing
 * while no task waits. There is no such trigger for CPUs: not all tasks of a machine can wait for a CPU.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "machine/machine.h"
#include "core/text.h"

/* Threshold and window [us]. Without CAP_SYS_RESOURCE a window is a multiple of 2 s. */
static const char trigger[] = "full 100000 2000000";

static const struct {
    const char *name;
    enum dh_machine_field field;
    size_t member; /* member of the head */
    enum { SOME, FULL } line; /* some tasks waited, or all tasks waited */
} files[DH_MACHINE_TRIGGERS] = {
    { "cpu", DH_PSI_CPU, offsetof(struct dh_machine_head, psi_cpu_some_us), SOME },
    { "memory", DH_PSI_MEMORY, offsetof(struct dh_machine_head, psi_memory_full_us), FULL },
    { "io", DH_PSI_IO, offsetof(struct dh_machine_head, psi_io_full_us), FULL },
};

static void file_read(struct dh_machine *m, int which)
{
    const struct dh_machine_record head = dh_machine_head_record(m, DH_MACHINE_PRESSURE);
    uint64_t *total = (uint64_t *)(void *)((char *)&m->work.head + files[which].member);
    uint64_t us[2] = { 0, 0 };
    char text[256];
    int64_t n = dh_machine_read_text(m, DH_ROOT_PROCFS, text, sizeof(text), "pressure/%s", files[which].name);

    if (n == -EOPNOTSUPP)
        n = -ENOENT; /* booted with psi=0 */
    if (n >= 0)
        n = dh_text_pressure(text, (size_t)n, us);
    if (n == 1 && files[which].line == FULL)
        n = DH_EPARSE;
    dh_machine_store(m, &head, files[which].field, total, dh_machine_to_err(n), us[files[which].line]);
}

static void all_read(struct dh_machine *m)
{
    const struct dh_machine_head *head = &m->work.head;
    uint64_t all = 0;

    for (int i = 0; i < DH_MACHINE_TRIGGERS; i++) {
        file_read(m, i);
        all |= DH_MACHINE_BIT(files[i].field);
    }
    dh_machine_state(m, DH_MACHINE_PRESSURE, head->seen & all, head->seen & ~head->valid & all);
}

/*
 * Open a trigger. A refusal (EPERM, EACCES, EROFS, EINVAL) is no failure: the file is still read
 * periodically. On a file outside procfs the write would succeed without any effect.
 */
static int trigger_open(const struct dh_machine *m, int which)
{
    char path[32] = "pressure/";
    struct statfs fs;
    int fd;

    strcat(path, files[which].name);
    fd = openat(m->root[DH_ROOT_PROCFS].fd, path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return -1;
    if (!fstatfs(fd, &fs) && fs.f_type == PROC_SUPER_MAGIC &&
        write(fd, trigger, sizeof(trigger)) == sizeof(trigger)) /* including the NUL, which the kernel
                                                                   requires */
        return fd;
    close(fd);
    return -1;
}

void dh_machine_pressure_pass(struct dh_machine *m)
{
    for (int i = 0; m->rare && i < DH_MACHINE_TRIGGERS; i++)
        if (m->trigger[i] < 0 && files[i].line == FULL)
            m->trigger[i] = trigger_open(m, i);
    all_read(m);
}

bool dh_machine_pressure_fired(struct dh_machine *m, int which, short revents)
{
    if (revents & (POLLERR | POLLNVAL)) { /* it would fire for ever; the next rare pass opens another one */
        close(m->trigger[which]);
        m->trigger[which] = -1;
        return false;
    }
    all_read(m);
    m->wake = true;
    return true;
}
