/*
 * durations.h - histogram of the durations of passes. One thread writes it, any thread reads it.
 *
 * Both sides use relaxed atomic accesses of whole words, so a reader sees no torn number.
 */
#ifndef DH_DURATIONS_H
#define DH_DURATIONS_H

#include <stdint.h>

#include "drahealth.h"

/* dh_durations_note() - count a pass. */
void dh_durations_note(struct dh_durations *d, uint64_t took_ns);

/* dh_durations_read() - return a copy. */
struct dh_durations dh_durations_read(const struct dh_durations *d);

#endif
