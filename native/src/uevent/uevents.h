/*
 * uevents.h - internals of the listener to device events. Not seen by Python.
 *
 * uevent_parse.c counts messages, without I/O and clock. uevent_socket.c opens the socket. uevents.c is the
 * thread that reads and publishes.
 */
#ifndef DH_UEVENTS_H
#define DH_UEVENTS_H

#include <stdbool.h>

#include "core/clock.h"
#include "drahealth.h"
#include "core/seqlock.h"
#include "core/worker.h"

#define DH_UEVENT_BUF 8192 /* the kernel's variables have at most 2 KiB, including the path */
#define DH_UEVENT_RESCAN_FDS 4

struct dh_uevent_counts {
    bool is_new; /* for the reader: a subsystem has changed, and */
    bool rescan; /* for the threads that read CPUs, memory and nodes, since uevents.c last cleared the flag */
    struct dh_uevent_sample sample;
};

/* uevent_parse.c: the enum dh_subsystem of a message; DH_EPARSE for malformed ones */
int dh_uevent_subsystem(const char *s, size_t n);
/* uevent_parse.c: count one message of the kernel */
void dh_uevent_count(struct dh_uevent_counts *h, const char *s, size_t n);
/* uevent_parse.c: count lost messages, of which the subsystem is unknown */
void dh_uevent_count_lost(struct dh_uevent_counts *h);

/* uevent_socket.c: open a non-blocking socket in this thread's network namespace. Return: it, or -errno */
int dh_uevent_socket(void);
/* uevent_socket.c: whether the kernel sends no device events to this network namespace; false if unknown */
bool dh_uevent_netns_is_silent(void);

struct dh_uevents {
    /* constant since dh_uevents_open() */
    int wake_fd;
    int rescan_fd[DH_UEVENT_RESCAN_FDS];
    uint32_t rescan_fds;

    /* used by the thread only */
    int fd;            /* -1 while there is no socket */
    bool events_lost;       /* events were lost, and the socket was not empty since */
    uint64_t paused_until_ns;  /* the socket is not read until then */
    uint64_t retry_ns; /* pause after the next failure */
    uint64_t notify_after_ns;  /* when the reader may be woken again */
    struct dh_uevent_counts counts;
    char buf[DH_UEVENT_BUF];

    /* shared with readers */
    struct dh_uevent_sample pub;
    struct dh_seqlock pub_lock;

    struct dh_worker worker;
};

/* uevents.c: one run of the thread's loop; called directly by tests */
void dh_uevents_run_once(struct dh_uevents *u);

#endif
