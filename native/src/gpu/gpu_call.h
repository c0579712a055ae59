/* gpu_call.h - calls of NVML. Each call is marked while it is under way, and has a deadline. */
#ifndef DH_GPU_CALL_H
#define DH_GPU_CALL_H

#include "gpu/gpu_state.h"

/*
 * A call and its start in one value, so that other threads read both consistently: nanoseconds with the
 * lowest 5 bits replaced by enum dh_nvml_call.
 */
#define DH_CALL_MASK 31ull
_Static_assert(DH_CALL_NUM <= DH_CALL_MASK + 1, "a call fits into 5 bits");

static inline uint64_t dh_call_pack(enum dh_nvml_call call, uint64_t now_ns)
{
    return (now_ns & ~DH_CALL_MASK) | (uint64_t)call;
}

/* gpu_call.c */
uint64_t dh_deadline_ns(const struct dh_gpu_watch *w, const struct dh_caller *c, uint64_t call);
void dh_gpus_notify(struct dh_gpu_watch *w);

/* gpu_budget.c */
void dh_call_measured(struct dh_caller *c, uint64_t call);

/* Mark a call as under way, without a check that the library is open. */
static inline void dh_call_mark(struct dh_caller *c, enum dh_nvml_call call, uint64_t now_ns)
{
    atomic_store(&c->current_call, dh_call_pack(call, now_ns));
    if (c->is_measured) {
        c->began_ns = dh_now_ns();
        c->began_cpu_ns = dh_clock_ns(CLOCK_THREAD_CPUTIME_ID);
    }
}

/*
 * dh_call_begin() - mark a call as under way. Return: false if the library was closed since the caller
 * entered the session; the call must then not be made.
 *
 * Both accesses are sequentially consistent, and dh_nvml_session_drain() makes the matching accesses in the
 * opposite order: either the caller sees that the library is being closed, or the closing thread sees the
 * call.
 */
static inline bool dh_call_begin(struct dh_gpu_watch *w, struct dh_caller *c, enum dh_nvml_call call,
                                 uint64_t now_ns)
{
    dh_call_mark(c, call, now_ns);
    if (atomic_load(&w->epoch) != c->epoch) {
        atomic_store(&c->current_call, 0);
        return false;
    }
    c->calls++;
    return true;
}

/*
 * dh_call_end() - mark the end of a call and return @code. Wakes the reader if the call was reported as
 * overdue.
 */
static inline nvmlReturn_t dh_call_end(struct dh_gpu_watch *w, struct dh_caller *c, nvmlReturn_t code)
{
    uint64_t call = atomic_load_explicit(&c->current_call, memory_order_relaxed);

    if (c->is_measured)
        dh_call_measured(c, call & DH_CALL_MASK);
    atomic_store(&c->current_call, 0);
    if (atomic_load(&c->reported_call) == call)
        dh_gpus_notify(w);
    return code;
}

/* Every call of NVML goes through this macro. A function that an older library lacks returns "not found". */
#define DH_NVML_AT(w, c, call, now_ns, function, ...)                                                   \
    (!(w)->nvml.function                      ? NVML_ERROR_FUNCTION_NOT_FOUND                           \
     : !dh_call_begin((w), (c), call, now_ns) ? NVML_ERROR_UNINITIALIZED                                \
                                              : dh_call_end((w), (c), (w)->nvml.function(__VA_ARGS__)))

#define DH_NVML(w, c, call, function, ...) DH_NVML_AT(w, c, call, dh_now_ns(), function, __VA_ARGS__)

/* Calls NVML in the opener's thread. */
#define OPENER_NVML(w, call, function, ...) DH_NVML(w, &(w)->opener, call, function, __VA_ARGS__)

#endif
