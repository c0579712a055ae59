/*
 * kmsg.h - the reader of the kernel log, inside. Not seen by Python.
 *
 * kmsg_lines.c turns bytes into entries: no I/O, no clock. kmsg.c is the thread that reads them, and
 * publishes.
 */
#ifndef DH_KMSG_H
#define DH_KMSG_H

#include <stdbool.h>

#include "clock.h"
#include "drahealth.h"
#include "seqlock.h"
#include "worker.h"

#define DH_LOG_BUF (8192 + 1) /* the kernel gives whole records or none: of 8 KiB at most */

struct dh_log_table {
    struct dh_log head;
    struct dh_log_line line[DH_LOG_MAX];
};

/* What is not published of an entry. */
struct dh_log_key {
    uint64_t seen; /* value of `matched` when it was seen last; a log's clocks and numbers may jump */
    uint32_t len;
    char key[DH_LOG_KEY];
};

struct dh_lines {
    const char *pattern[DH_PATTERN_MAX];
    uint32_t patterns;
    bool any_facility;
    bool any;      /* a record was read */
    bool overlong; /* what comes is the rest of a line that was longer than the buffer */
    bool broken;   /* the last line was no record */
    bool latched;  /* since whoever looks here cleared it; so the next */
    bool fresh;    /* a new entry */
    size_t have;   /* bytes in buf: of a line that has not ended */
    uint64_t dirty[DH_LOG_MAX / 64]; /* bit per entry */
    uint64_t hash[DH_LOG_MAX];       /* of pattern and key; apart, so that a look is one walk over 4 KiB */
    struct dh_log_key key[DH_LOG_MAX];
    struct dh_log_table work;
    char buf[DH_LOG_BUF];
};

/* kmsg_lines.c: @n more bytes are in buf, behind the first `have` */
void dh_lines_take(struct dh_lines *l, size_t n);

struct dh_kmsg {
    /* constant since dh_kmsg_open() */
    char *path;
    char *patterns;
    int wake_fd;

    /* the thread's own */
    int fd;            /* -1 while it cannot be opened */
    uint64_t rest_ns;  /* the log is left alone until then */
    uint64_t retry_ns; /* after the next failure it is for so long */
    uint64_t rung_ns;  /* when the reader was woken last */
    int news;          /* what the reader was not woken for yet */
    struct dh_lines lines;

    /* shared with readers */
    struct dh_log_table pub;
    struct dh_seqlock pub_lock;

    struct dh_worker worker;
};

/* kmsg.c: one turn of the thread, for tests on their own */
void dh_kmsg_turn(struct dh_kmsg *k);

#endif
