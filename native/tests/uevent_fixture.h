/*
 * uevent_fixture.h - device events of our own making, through the real kernel, in a network namespace that
 * nobody else is in.
 *
 * Whoever has CAP_SYS_ADMIN over a network namespace may hand the kernel an event, which then tells it to
 * all who listen there (uevent_net_rcv() in lib/kobject_uevent.c). Include once per program, after fixture.h.
 */
#ifndef DH_UEVENT_FIXTURE_H
#define DH_UEVENT_FIXTURE_H

#include <linux/netlink.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include "uevents.h"

#define GPU "/devices/pci0000:3a/0000:3b:00.0"

static int ue_injector;
static bool ue_user; /* the namespace is a user namespace's of our own, too */

static inline int ue_socket(void)
{
    struct sockaddr_nl any = { .nl_family = AF_NETLINK };
    int fd = socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_KOBJECT_UEVENT);

    fx_must(fd >= 0 && !bind(fd, (struct sockaddr *)&any, sizeof(any)), "socket");
    return fd;
}

/*
 * Go into a network namespace of our own, once, with no other thread yet; false if that is not allowed.
 * With a user namespace no event of the machine is heard there. What has threads already, as programs under
 * ThreadSanitizer have, gets none.
 */
static inline bool ue_isolated(void)
{
    ue_user = !unshare(CLONE_NEWUSER | CLONE_NEWNET);
    if (!ue_user && unshare(CLONE_NEWNET))
        return false;
    ue_injector = ue_socket();
    return true;
}

/* @n bytes for the kernel to tell, which puts SEQNUM behind them. */
static inline void ue_inject_bytes(const char *body, size_t n)
{
    struct {
        struct nlmsghdr head;
        char body[2048];
    } message = { .head = { .nlmsg_type = NLMSG_MIN_TYPE, .nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK } };
    struct sockaddr_nl kernel = { .nl_family = AF_NETLINK };
    struct {
        struct nlmsghdr head;
        struct nlmsgerr error;
        char more[4096];
    } answer;

    fx_must(n <= sizeof(message.body), "an event of 2 KiB");
    memcpy(message.body, body, n);
    message.head.nlmsg_len = (uint32_t)(sizeof(message.head) + n);
    fx_must(sendto(ue_injector, &message, message.head.nlmsg_len, 0, (struct sockaddr *)&kernel,
                   sizeof(kernel)) > 0, "sendto");
    fx_must(recv(ue_injector, &answer, sizeof(answer), 0) > 0, "recv");
    errno = -answer.error.error;
    fx_must(!errno, "an event is injected");
}

/* Strings, each with its NUL, as the kernel has them: action@path, ACTION, DEVPATH, SUBSYSTEM. */
static inline size_t ue_format(char *to, size_t cap, const char *action, const char *path,
                               const char *subsystem)
{
    int n = snprintf(to, cap, "%s@%s%cACTION=%s%cDEVPATH=%s%cSUBSYSTEM=%s", action, path, 0, action, 0, path,
                     0, subsystem);

    fx_must(n > 0 && (size_t)n < cap, "ue_format");
    return (size_t)n + 1;
}

static inline void ue_inject(const char *action, const char *path, const char *subsystem)
{
    char body[2048];

    ue_inject_bytes(body, ue_format(body, sizeof(body), action, path, subsystem));
}

#endif
