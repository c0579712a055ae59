/*
 * kmsg.h - internals of the kernel log reader. Not seen by Python.
 *
 * kmsg_lines.c turns bytes into entries, without I/O and clock. kmsg.c is the thread that reads and
 * publishes.
 */
#ifndef DH_KMSG_H
#define DH_KMSG_H

#include <stdbool.h>

#include "core/clock.h"
#include "drahealth.h"
#include "core/seqlock.h"
#include "core/worker.h"

#define DH_LOG_BUF (8192 + 1) /* the kernel returns whole records of at most 8 KiB */

struct dh_log_table {
    struct dh_log head;
    struct dh_log_line line[DH_LOG_MAX];
};

/* The unpublished part of an entry. */
struct dh_log_key {
    uint64_t seen; /* `matched` when the entry was last seen; clocks and numbers of a log may jump */
    uint32_t len;
    char key[DH_LOG_KEY];
};

struct dh_lines {
    const char *pattern[DH_PATTERN_MAX];
    uint32_t patterns;
    bool any_facility;
    bool any_record;      /* a record was read */
    bool overlong; /* skip the rest of a line that was longer than the buffer */
    bool malformed;   /* the last line was no record */
    bool changed;  /* an entry changed, and */
    bool new_entry;    /* an entry is new, since the thread last cleared the flag */
    size_t buffered;   /* bytes in buf, of a line that has not ended */
    uint64_t dirty[DH_LOG_MAX / 64]; /* bit per entry */
    uint64_t hash[DH_LOG_MAX];       /* of pattern and key; separate, so that a search scans only 4 KiB */
    struct dh_log_key key[DH_LOG_MAX];
    struct dh_log_table work;
    char buf[DH_LOG_BUF];
};

/* kmsg_lines.c: parse @n more bytes in buf, after the `buffered` ones */
void dh_lines_feed(struct dh_lines *l, size_t n);

struct dh_kmsg {
    /* constant since dh_kmsg_open() */
    char *path;
    char *patterns;
    int wake_fd;

    /* used by the thread only */
    int fd;            /* -1 while it cannot be opened */
    uint64_t paused_until_ns;  /* the log is not read until then */
    uint64_t retry_ns; /* pause after the next failure */
    uint64_t notified_ns;  /* last wake of the reader */
    int wake_reason;          /* why the reader is to be woken; WAKE_NONE */
    struct dh_lines lines;

    /* shared with readers */
    struct dh_log_table pub;
    struct dh_seqlock pub_lock;

    struct dh_worker worker;
};

/* kmsg.c: one run of the thread's loop; called directly by tests */
void dh_kmsg_run_once(struct dh_kmsg *k);

#endif
