/*
 * Tests of the device event listener on the caller's thread: its counts, its wakes and rescan requests. The
 * messages of the second half come from the kernel, in a private network namespace.
 */
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "check.h"
#include "fixture.h"
#include "uevent_fixture.h"

#define MESSAGE(text) text, sizeof(text)

/* ---- messages ---- */

static struct dh_uevent_counts counts; /* by the checks of this half, each starting from zero */

static const struct dh_uevent_sample *receive(const char *s, size_t n)
{
    char *copy = check_copy(s, n);

    dh_uevent_count(&counts, copy, n);
    free(copy);
    return &counts.sample;
}

static void forget(void)
{
    memset(&counts, 0, sizeof(counts));
}

static uint64_t all_changes(const struct dh_uevent_sample *sample)
{
    uint64_t sum = 0;

    for (int i = 0; i < DH_SUBSYSTEM_NUM; i++)
        sum += sample->changes[i];
    return sum;
}

static const struct dh_uevent_sample *happens(const char *action, const char *path, const char *subsystem)
{
    char text[2048];

    return receive(text, ue_format(text, sizeof(text), action, path, subsystem));
}

static void test_message_counts_for_its_subsystem(void)
{
    const struct dh_uevent_sample *sample;

    forget();
    sample = receive(MESSAGE("unbind@" GPU "\0ACTION=unbind\0DEVPATH=" GPU "\0SUBSYSTEM=pci\0PCI_CLASS=30200\0"
                          "PCI_SLOT_NAME=0000:3b:00.0\0DRIVER=nvidia\0SEQNUM=4711"));
    CHECK_U64(sample->changes[DH_SUBSYSTEM_PCI], 1);
    CHECK_U64(all_changes(sample) + sample->malformed, 1);
    CHECK(counts.is_new && !counts.rescan);
}

/* Its first SUBSYSTEM is the kernel's; a driver may have added later variables. */
static void test_first_of_two_subsystems_counts(void)
{
    const struct dh_uevent_sample *sample;

    forget();
    sample = receive(MESSAGE("add@/x\0XSUBSYSTEM=edac\0SUBSYSTEM=pci\0SUBSYSTEM=cpu"));
    CHECK_U64(sample->changes[DH_SUBSYSTEM_PCI], 1);
    CHECK_U64(all_changes(sample), 1);
}

static void test_malformed_message_is_counted(void)
{
    static const struct {
        const char *text;
        size_t n;
    } bad[] = {
        { "", 0 },
        { MESSAGE("") },
        { MESSAGE("libudev") },
        { MESSAGE("add\0at@/x\0SUBSYSTEM=pci") },
        { MESSAGE("add@x\0SUBSYSTEM=pci") },
        { MESSAGE("add@") },
        { MESSAGE("add@/x") },
        { MESSAGE("add@/x\0SUBSYSTEM") },
        { MESSAGE("add@/x\0SEQNUM=1") },
        { "add@/x\0SUBSYSTEM=pci", 20 }, /* without the last NUL */
        { "add@/x", 6 },
    };

    forget();
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        const struct dh_uevent_sample *sample = receive(bad[i].text, bad[i].n);

        check_row = bad[i].text;
        CHECK_U64(sample->malformed, i + 1);
        CHECK(!all_changes(sample) && !counts.is_new);
    }
    check_row = "";
    CHECK_U64(receive(MESSAGE("add@/x\0SUBSYSTEM=pci"))->changes[DH_SUBSYSTEM_PCI], 1);
}

static void test_other_subsystems_are_ignored(void)
{
    forget();
    happens("add", "/devices/virtual/net/veth1", "net");
    happens("add", "/devices/system/cpu/cpu1", "cpuid");
    happens("add", "/bus/pci/drivers/nvidia", "drivers");
    CHECK_U64(all_changes(&counts.sample) + counts.sample.malformed, 0);
    CHECK(!counts.is_new && !counts.rescan);
}

static void test_every_action_is_a_change(void)
{
    static const char *const actions[] = { "add",     "remove", "change", "move",   "online",
                                           "offline", "bind",   "unbind", "implode" };

    forget();
    for (size_t i = 0; i < sizeof(actions) / sizeof(*actions); i++) {
        check_row = actions[i];
        counts.is_new = false;
        CHECK_U64(happens(actions[i], GPU, "pci")->changes[DH_SUBSYSTEM_PCI], i + 1);
        CHECK(counts.is_new);
    }
    check_row = "";
}

static void test_every_subsystem_but_pci_requests_a_rescan(void)
{
    static const struct {
        const char *name;
        enum dh_subsystem subsystem;
        bool rescan;
    } row[] = {
        { "cpu", DH_SUBSYSTEM_CPU, true },   { "memory", DH_SUBSYSTEM_MEMORY, true },
        { "node", DH_SUBSYSTEM_NODE, true }, { "machinecheck", DH_SUBSYSTEM_MACHINECHECK, true },
        { "edac", DH_SUBSYSTEM_EDAC, true }, { "pci", DH_SUBSYSTEM_PCI, false },
    };

    for (size_t i = 0; i < sizeof(row) / sizeof(*row); i++) {
        check_row = row[i].name;
        forget();
        happens("change", "/devices/x", row[i].name);
        CHECK_U64(counts.sample.changes[row[i].subsystem], 1);
        CHECK(counts.is_new);
        CHECK_INT(counts.rescan, row[i].rescan);
    }
    check_row = "";
}

static void test_lost_events_count_for_every_subsystem(void)
{
    forget();
    dh_uevent_count_lost(&counts);
    for (int i = 0; i < DH_SUBSYSTEM_NUM; i++)
        CHECK_U64(counts.sample.changes[i], 1);
    CHECK(counts.is_new && counts.rescan);
}

/* ---- the socket ---- */

struct listener {
    struct dh_uevents *u;
    int wake_fd;
    int rescan_fd;
    uint64_t run_ns; /* start of the last run */
    struct dh_uevent_sample sample; /* copied after that run */
};

static void run_once(struct listener *e)
{
    e->u->paused_until_ns = 0;
    e->run_ns = dh_now_ns();
    dh_uevents_run_once(e->u);
    CHECK_INT(dh_uevents_read(e->u, &e->sample, sizeof(e->sample)), sizeof(e->sample));
}

static uint64_t taken(int fd)
{
    uint64_t n;

    return read(fd, &n, sizeof(n)) == sizeof(n) ? n : 0;
}

static struct listener opened(void)
{
    struct listener e = { .wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC) };

    e.rescan_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    fx_must(!dh_uevents_open(e.wake_fd, &e.rescan_fd, 1, &e.u), "dh_uevents_open");
    return e;
}

/*
 * Return a listener whose first wakes are cleared.
 */
static struct listener listening(void)
{
    struct listener e = opened();

    run_once(&e);
    CHECK(e.u->fd >= 0);
    CHECK_U64(taken(e.wake_fd), 1);
    e.u->notify_after_ns = 0;
    return e;
}

static void closed(struct listener *e)
{
    CHECK_INT(dh_uevents_stop(e->u, 0), 0);
    close(e->wake_fd);
    close(e->rescan_fd);
}

static void test_kernel_events_are_published(void)
{
    struct listener e = listening();

    CHECK_U64(e.sample.changes[DH_SUBSYSTEM_PCI], 0); /* events before the start are no loss */
    CHECK_U64(e.sample.size, sizeof(e.sample));
    ue_inject("add", GPU, "pci");
    run_once(&e);
    CHECK_U64(e.sample.changes[DH_SUBSYSTEM_PCI], 1);
    CHECK(e.sample.heartbeat_ns >= e.run_ns);
    CHECK_U64(taken(e.wake_fd), 1);
    CHECK_U64(taken(e.rescan_fd), 0);
    ue_inject("offline", "/devices/system/memory/memory32", "memory");
    run_once(&e);
    CHECK_U64(taken(e.wake_fd), 1);
    CHECK_U64(taken(e.rescan_fd), 1);
    CHECK_U64(e.sample.changes[DH_SUBSYSTEM_MEMORY], 1);
    CHECK_INT(dh_uevents_read(e.u, &e.sample, sizeof(e.sample) - 1), -ENOSPC);
    closed(&e);
}

static void test_network_device_events_wake_no_reader(void)
{
    struct listener e = listening();

    for (int i = 0; i < 50; i++)
        ue_inject("add", "/devices/virtual/net/veth1", "net");
    run_once(&e);
    CHECK_U64(taken(e.wake_fd) + taken(e.rescan_fd), 0);
    ue_inject("add", GPU, "pci"); /* received, or this check would fail */
    run_once(&e);
    CHECK_U64(all_changes(&e.sample), 1);
    CHECK_U64(taken(e.wake_fd), 1);
    closed(&e);
}

/* Root of a network namespace may send to the group, but not from the kernel's port. */
static void test_messages_of_other_senders_are_ignored(void)
{
    struct sockaddr_nl everybody = { .nl_family = AF_NETLINK, .nl_groups = 1 };
    struct listener e = listening();
    char text[2048];
    size_t n = ue_format(text, sizeof(text), "remove", GPU, "pci");
    int fd = ue_socket();

    fx_must(sendto(fd, text, n, 0, (struct sockaddr *)&everybody, sizeof(everybody)) == (ssize_t)n, "sendto");
    run_once(&e);
    CHECK_U64(e.sample.foreign, 1);
    CHECK_U64(all_changes(&e.sample) + e.sample.malformed, 0);
    CHECK_U64(taken(e.wake_fd), 0);
    close(fd);
    closed(&e);
}

static void test_socket_overflow_is_a_loss(void)
{
    struct listener e = listening();
    int bytes = 1; /* the kernel's minimum: some five events */
    uint64_t before;

    fx_must(!setsockopt(e.u->fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes)), "setsockopt");
    for (int i = 0; i < 50; i++)
        ue_inject("add", GPU, "pci");
    run_once(&e);
    CHECK_U64(e.sample.lost, 1);
    before = e.sample.changes[DH_SUBSYSTEM_PCI]; /* the events received, and the loss */
    CHECK(before > 1 && before < 50);
    CHECK_U64(e.sample.changes[DH_SUBSYSTEM_CPU], 1);
    CHECK_U64(taken(e.wake_fd), 1);
    CHECK_U64(taken(e.rescan_fd), 1);
    CHECK_U64(e.sample.failures, 0);
    ue_inject("remove", GPU, "pci"); /* and it continues */
    run_once(&e);
    CHECK_U64(e.sample.changes[DH_SUBSYSTEM_PCI], before + 1);
    CHECK_U64(e.sample.lost, 1);
    closed(&e);
}

static void test_first_wakes_come_at_once_then_rate_limited(void)
{
    struct listener e = listening();
    uint64_t woken = 0;

    for (int i = 0; i < 20; i++) {
        ue_inject("change", "/devices/system/node/node1", "node");
        run_once(&e);
        woken += taken(e.wake_fd);
    }
    CHECK(woken >= 5);
    CHECK_U64(taken(e.rescan_fd), woken);
    e.u->notify_after_ns = dh_now_ns() + 3600 * DH_NS;
    ue_inject("change", "/devices/system/node/node1", "node");
    run_once(&e);
    CHECK_U64(taken(e.wake_fd), 0);
    e.u->notify_after_ns = dh_now_ns();
    run_once(&e);
    CHECK_U64(taken(e.wake_fd), 1); /* reported later */
    CHECK_U64(taken(e.rescan_fd), 1);
    run_once(&e);
    CHECK_U64(taken(e.wake_fd), 0);
    closed(&e);
}

static void test_run_ends_during_a_flood(void)
{
    struct listener e = listening();

    for (int i = 0; i < 300; i++)
        ue_inject("add", GPU, "pci");
    run_once(&e);
    CHECK_U64(e.sample.changes[DH_SUBSYSTEM_PCI], 256);
    CHECK(e.u->paused_until_ns > 0);
    run_once(&e);
    CHECK_U64(e.sample.changes[DH_SUBSYSTEM_PCI], 300);
    CHECK_U64(e.u->paused_until_ns, 0);
    closed(&e);
}

static void test_failed_socket_is_reopened_and_counts_a_loss(void)
{
    struct listener e = listening();

    close(e.u->fd);
    e.u->fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    run_once(&e);
    CHECK_INT(e.sample.state, DH_STATE_FAILING);
    CHECK_INT(e.sample.err, ENOTSOCK);
    CHECK_U64(e.sample.failures, 1);
    CHECK_INT(e.u->fd, -1);
    CHECK(e.u->paused_until_ns >= e.run_ns + DH_NS);
    CHECK_U64(taken(e.wake_fd), 1);
    run_once(&e);
    CHECK(e.sample.state != DH_STATE_FAILING);
    CHECK_U64(e.sample.changes[DH_SUBSYSTEM_PCI], 1);
    CHECK_U64(taken(e.wake_fd), 1);
    CHECK_U64(taken(e.rescan_fd), 1);
    ue_inject("add", GPU, "pci");
    run_once(&e);
    CHECK_U64(e.sample.changes[DH_SUBSYSTEM_PCI], 2);
    closed(&e);
}

static void test_without_descriptors_it_fails_and_backs_off(void)
{
    struct rlimit before, none = { 0 };
    struct listener e = opened();

    fx_must(!getrlimit(RLIMIT_NOFILE, &before), "getrlimit");
    none.rlim_max = before.rlim_max;
    fx_must(!setrlimit(RLIMIT_NOFILE, &none), "setrlimit");
    for (int i = 0; i < 10; i++)
        run_once(&e);
    fx_must(!setrlimit(RLIMIT_NOFILE, &before), "setrlimit");
    CHECK_INT(e.sample.state, DH_STATE_FAILING);
    CHECK_INT(e.sample.err, EMFILE);
    CHECK_U64(e.sample.failures, 10);
    CHECK_U64(taken(e.wake_fd), 1); /* nothing new after the first */
    CHECK_U64(e.u->retry_ns, 60 * DH_NS);
    run_once(&e);
    CHECK(e.sample.state != DH_STATE_FAILING);
    CHECK_U64(e.u->retry_ns, DH_NS);
    closed(&e);
}

static void test_user_namespace_network_is_silent(void)
{
    struct listener e = listening();

    CHECK(e.sample.silent == 1 || !ue_user);
    CHECK_INT(e.sample.state, e.sample.silent ? DH_STATE_ABSENT : DH_STATE_OK);
    CHECK_INT(e.sample.err, 0);
    closed(&e);
}

static void test_invalid_arguments_are_refused(void)
{
    int descriptors = fx_count("/proc/self/fd"), fd = eventfd(0, EFD_CLOEXEC);
    int rescan[5] = { fd, fd, fd, fd, fd };
    struct dh_uevents *u;

    CHECK_INT(dh_uevents_open(fd, rescan, 5, &u), -EINVAL);
    CHECK_INT(dh_uevents_open(-1, rescan, 1, &u), -EBADF);
    rescan[3] = -1;
    CHECK_INT(dh_uevents_open(fd, rescan, 4, &u), -EBADF);
    CHECK_INT(dh_uevents_open(fd, rescan, 3, &u), 0);
    CHECK_INT(dh_uevents_read(u, rescan, 0), -ENOSPC);
    CHECK_INT(dh_uevents_stop(u, 0), 0);
    close(fd);
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
}

/* As systemd's RestrictAddressFamilies= does. For the rest of this program's life. */
static void forbid_netlink(void)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_NETLINK, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAFNOSUPPORT),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = { .len = sizeof(filter) / sizeof(*filter), .filter = filter };

    fx_must(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs");
    fx_must(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0), "seccomp");
}

static void test_forbidden_socket_is_absent(void)
{
    struct listener e = opened();

    forbid_netlink();
    for (int i = 0; i < 3; i++)
        run_once(&e);
    CHECK_INT(e.sample.state, DH_STATE_ABSENT);
    CHECK_INT(e.sample.err, EAFNOSUPPORT);
    CHECK_U64(e.sample.failures, 0);
    CHECK_U64(e.sample.silent, 0);
    CHECK_U64(taken(e.wake_fd), 1);
    CHECK(e.u->paused_until_ns >= e.run_ns + 60 * DH_NS);
    closed(&e);
}

int main(void)
{
    test_message_counts_for_its_subsystem();
    test_first_of_two_subsystems_counts();
    test_malformed_message_is_counted();
    test_other_subsystems_are_ignored();
    test_every_action_is_a_change();
    test_every_subsystem_but_pci_requests_a_rescan();
    test_lost_events_count_for_every_subsystem();
    test_invalid_arguments_are_refused();
    if (!ue_isolated()) {
        check_skip("test_uevents", "no network namespace of its own for the socket");
        return check_done("test_uevents");
    }
    test_kernel_events_are_published();
    test_network_device_events_wake_no_reader();
    test_messages_of_other_senders_are_ignored();
    test_socket_overflow_is_a_loss();
    test_first_wakes_come_at_once_then_rate_limited();
    test_run_ends_during_a_flood();
    test_failed_socket_is_reopened_and_counts_a_loss();
    test_without_descriptors_it_fails_and_backs_off();
    test_user_namespace_network_is_silent();
    test_forbidden_socket_is_absent();
    return check_done("test_uevents");
}
