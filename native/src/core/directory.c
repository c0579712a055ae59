/* directory.c - notification of changes in a directory. */
#include <errno.h>
#include <sys/inotify.h>
#include <unistd.h>

#include "drahealth.h"

/*
 * IN_CREATE is left out: it comes before the first byte is written, and the reader would find half a file. So
 * a link that is created in the directory is not reported; a link that is moved into it is.
 */
#define NAMES (IN_MOVED_TO | IN_MOVED_FROM | IN_DELETE | IN_DELETE_SELF | IN_MOVE_SELF)
#define WRITES (IN_CLOSE_WRITE | IN_ATTRIB)

int dh_directory_watch(const char *path, int writes)
{
    int fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    int err;

    if (fd < 0)
        return -errno;
    if (inotify_add_watch(fd, path, NAMES | (writes ? WRITES : 0) | IN_ONLYDIR) < 0) {
        err = -errno;
        close(fd);
        return err;
    }
    return fd;
}
