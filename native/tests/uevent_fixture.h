/*
 * uevent_fixture.h - synthetic device events, sent through the real kernel in a private network namespace.
 *
 * A process with CAP_SYS_ADMIN over a network namespace may pass the kernel an event, which the kernel sends
 * to all listeners of the namespace (uevent_net_rcv() in lib/kobject_uevent.c). Include once per program,
 * after fixture.h.
 */
#ifndef DH_UEVENT_FIXTURE_H
#define DH_UEVENT_FIXTURE_H

#include <linux/netlink.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include "uevent/uevents.h"

#define GPU "/devices/pci0000:3a/0000:3b:00.0"

static int ue_injector;
static bool ue_user; /* the namespace belongs to a private user namespace */

static inline int ue_socket(void)
{
    struct sockaddr_nl any = { .nl_family = AF_NETLINK };
    int fd = socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_KOBJECT_UEVENT);

    fx_must(fd >= 0 && !bind(fd, (struct sockaddr *)&any, sizeof(any)), "socket");
    return fd;
}

/*
 * Enter a private network namespace, once, before any other thread exists. Return: false if that is not
 * allowed. With a user namespace, no events of the real machine arrive there. A program that already has
 * threads, as under ThreadSanitizer, gets none.
 */
static inline bool ue_isolated(void)
{
    ue_user = !unshare(CLONE_NEWUSER | CLONE_NEWNET);
    if (!ue_user && unshare(CLONE_NEWNET))
        return false;
    ue_injector = ue_socket();
    return true;
}

/* Pass @n bytes to the kernel, which appends SEQNUM and sends them. */
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

/* Format NUL-terminated strings as the kernel does: action@path, ACTION, DEVPATH, SUBSYSTEM. */
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
