/*
 * uevents.h - the listener to the kernel's device events, inside. Not seen by Python.
 *
 * uevent_parse.c turns messages into counts: no I/O, no clock. uevent_socket.c knows where they come from.
 * uevents.c is the thread that hears them, and publishes.
 */
#ifndef DH_UEVENTS_H
#define DH_UEVENTS_H

#include <stdbool.h>

#include "clock.h"
#include "drahealth.h"
#include "seqlock.h"
#include "worker.h"

#define DH_UEVENT_BUF 8192 /* the kernel's variables are 2 KiB at most, and the path is among them */
#define DH_UEVENT_POKES 4

struct dh_heard {
    bool news; /* for the reader, since whoever looks here cleared it; so the next */
    bool poke; /* for those who read CPUs, memory and nodes */
    struct dh_uevent_sample sample;
};

/* uevent_parse.c: an enum dh_subsystem; DH_EPARSE of what the kernel does not write */
int dh_uevent_subsystem(const char *s, size_t n);
/* uevent_parse.c: one message of the kernel */
void dh_heard_take(struct dh_heard *h, const char *s, size_t n);
/* uevent_parse.c: some were not heard, and nobody knows of what */
void dh_heard_missed(struct dh_heard *h);

/* uevent_socket.c: a socket that hears this thread's network namespace, non-blocking; or -errno */
int dh_uevent_socket(void);
/* uevent_socket.c: whether the kernel sends no device events there. If that cannot be told, it sends them. */
bool dh_uevent_deaf(void);

struct dh_uevents {
    /* constant since dh_uevents_open() */
    int wake_fd;
    int poke_fd[DH_UEVENT_POKES];
    uint32_t pokes;

    /* the thread's own */
    int fd;            /* -1 while there is no socket */
    bool missed;       /* something was not heard, and the socket was not empty since */
    uint64_t rest_ns;  /* it is left alone until then */
    uint64_t retry_ns; /* after the next failure it is for so long */
    uint64_t ring_ns;  /* when the reader may be woken again */
    struct dh_heard heard;
    char buf[DH_UEVENT_BUF];

    /* shared with readers */
    struct dh_uevent_sample pub;
    struct dh_seqlock pub_lock;

    struct dh_worker worker;
};

/* uevents.c: one turn of the thread, for tests on their own */
void dh_uevents_turn(struct dh_uevents *u);

#endif
