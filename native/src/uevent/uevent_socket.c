/*
 * uevent_socket.c - the kernel's netlink socket for device events, and whether the kernel sends any.
 *
 * Device events go to network namespaces of the initial user namespace only: in a container with its own user
 * namespace the socket opens, but stays silent (uevent_net_init() in lib/kobject_uevent.c).
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <linux/nsfs.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "uevent/uevents.h"

#define GROUP_KERNEL 1                /* group 2 is udevd's */
#define ROOM_BYTES (8 * 1024 * 1024)  /* some 20,000 events: the kernel doubles it, and counts 830 bytes for
                                         each */
#define INITIAL_USERNS 0xeffffffdu    /* PROC_USER_INIT_INO in include/linux/proc_ns.h */

/*
 * Enlarge the receive buffer, which is a limit and costs nothing while it is empty. Without CAP_NET_ADMIN
 * net.core.rmem_max applies: 208 KiB by default, some 500 events. Lost events are reported as an overflow.
 */
static void room_make(int fd)
{
    int bytes = ROOM_BYTES;

    if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof(bytes)))
        (void)setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes));
}

int dh_uevent_socket(void)
{
    struct sockaddr_nl address = { .nl_family = AF_NETLINK, .nl_groups = GROUP_KERNEL };
    int fd = socket(AF_NETLINK, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, NETLINK_KOBJECT_UEVENT);
    int err;

    if (fd < 0)
        return -errno;
    room_make(fd);
    if (bind(fd, (const struct sockaddr *)&address, sizeof(address))) {
        err = -errno;
        close(fd);
        return err;
    }
    return fd;
}

/*
 * Return whether the kernel sends no events. False if unknown: in a child of the owner's namespace (EPERM),
 * and in kernels before 4.9.
 */
bool dh_uevent_netns_is_silent(void)
{
    int net = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
    int owner = net < 0 ? -1 : ioctl(net, NS_GET_USERNS);
    struct stat st;
    bool silent = owner >= 0 && !fstat(owner, &st) && st.st_ino != INITIAL_USERNS;

    if (owner >= 0)
        close(owner);
    if (net >= 0)
        close(net);
    return silent;
}
