/* execute.c - executes a parsed command at once. Nothing here can fail: the parser has checked everything. */
#include "command.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void change(struct fake_gpu *g, const struct fake_change *c)
{
    if (c->link)
        fake_add(&g->link[c->link - 1][c->quantity], &fake_link_traits[c->quantity], c->relative, c->value);
    else
        fake_add(&g->value[c->quantity], &fake_traits[c->quantity], c->relative, c->value);
}

static uint64_t until(const struct fake_command *c)
{
    return c->duration_ns ? fake_now() + c->duration_ns : 0;
}

/* End the process as a broken driver does. */
static void crash(const struct fake_command *c)
{
    if (c->flag)
        exit((int)c->num);
    signal((int)c->num, SIG_DFL);
    kill(getpid(), (int)c->num); /* not raise(3): the thread of the socket blocks all signals */
}

/* Allocate memory that nothing frees. NULL if there is none: a driver that checks nothing writes to it. */
static void leak(uint32_t mib)
{
    size_t bytes = (size_t)mib << 20;
    volatile char *memory = malloc(bytes);

    for (size_t i = 0; i < bytes; i += 4096)
        memory[i] = 1;
}

static void execute(const struct fake_command *c)
{
    struct fake_gpu *g = &fake.gpu[c->gpu];

    switch (c->verb) {
    case FAKE_EVENT:
        fake_emit(g, c->type, c->data, c->gi, c->ci);
        break;
    case FAKE_SET:
        for (uint32_t i = 0; i < c->num; i++)
            change(g, &c->change[i]);
        break;
    case FAKE_LOST:
        g->lost = true;
        fake_emit(g, nvmlEventTypeGpuUnavailableError, 0, FAKE_WHOLE_GPU, FAKE_WHOLE_GPU);
        break;
    case FAKE_BACK:
        g->lost = false;
        break;
    case FAKE_RESET:
        fake_gpu_reset(g);
        break;
    case FAKE_REPLACE:
        fake_gpu_replace(g);
        break;
    case FAKE_NAMELESS:
        g->nameless = true;
        break;
    case FAKE_MIG:
        fake_partition(g, c->flag, c->mig, c->num);
        break;
    case FAKE_HANG:
        g->hang.on = true;
        g->hang.call = c->call;
        g->hang.holds_driver = c->flag;
        g->hang.until_ns = until(c);
        break;
    case FAKE_RELEASE:
        g->hang.on = false;
        break;
    case FAKE_SLOW:
        g->slow_ns = c->duration_ns;
        break;
    case FAKE_FAIL:
        g->fail_call[c->call] = (uint16_t)c->code;
        break;
    case FAKE_FAIL_FIELD:
        g->fail_field[c->num] = (uint16_t)c->code;
        break;
    case FAKE_FAIL_LINK:
        g->fail_link[c->num] = (uint16_t)c->code;
        break;
    case FAKE_INIT:
        fake.init_answer = (uint16_t)c->code;
        break;
    case FAKE_INIT_HANG:
        fake.init_hangs_until_ns = until(c);
        break;
    case FAKE_RELOAD:
        fake_driver_load(c->text[0] ? c->text : NULL, c->num ? c->num : fake.gpus, c->flag);
        break;
    case FAKE_WAIT:
        fake.wait_answer = (uint16_t)c->code;
        fake.wait_empty = c->flag;
        break;
    case FAKE_COUNT:
        fake.count_answer = (uint16_t)c->code;
        fake.count_once = c->flag;
        break;
    case FAKE_LISTED:
        fake.listed = c->num;
        break;
    case FAKE_ENDLESS:
        fake.endless = c->flag;
        break;
    case FAKE_CRASH:
        crash(c);
        break;
    case FAKE_LEAK:
        leak(c->num);
        break;
    case FAKE_NOTHING: case FAKE_PROFILE: case FAKE_SOCKET: case FAKE_STORM:
    case FAKE_CALLS: case FAKE_HUNG:
        break;
    }
    pthread_cond_broadcast(&fake.changed);
}

void fake_execute(const struct fake_command *c, char answer[FAKE_ERROR])
{
    const struct fake_gpu *g = &fake.gpu[c->gpu];

    execute(c);
    if (c->verb == FAKE_CALLS)
        snprintf(answer, FAKE_ERROR, "ok %llu", (unsigned long long)g->calls[c->call]);
    else if (c->verb == FAKE_HUNG)
        snprintf(answer, FAKE_ERROR, "ok %u", g->hung);
    else
        snprintf(answer, FAKE_ERROR, "ok");
}
