/* directory.c - to be told when a directory has changed, without a look at it. */
#include <errno.h>
#include <sys/inotify.h>
#include <unistd.h>

#include "drahealth.h"

/*
 * Not IN_CREATE: that is before the first byte is written, and a look then would find half a file. So a link
 * made in the directory is not told of; one that is moved into it is.
 */
#define CHANGES                                                                                        \
    (IN_CLOSE_WRITE | IN_MOVED_TO | IN_MOVED_FROM | IN_DELETE | IN_ATTRIB | IN_DELETE_SELF | IN_MOVE_SELF)

int dh_directory_watch(const char *path)
{
    int fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    int err;

    if (fd < 0)
        return -errno;
    if (inotify_add_watch(fd, path, CHANGES | IN_ONLYDIR) < 0) {
        err = -errno;
        close(fd);
        return err;
    }
    return fd;
}
