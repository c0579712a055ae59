/* heap.c - the heap of the C library. */
#include <malloc.h>

#include "drahealth.h"

void dh_heap_one_arena(void)
{
#ifdef __GLIBC__
    mallopt(M_ARENA_MAX, 1);
#endif
}

void dh_heap_trim(void)
{
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}
