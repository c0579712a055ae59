/*
 * command.c - parses and checks a line of a scenario. Unknown input is an error that names it.
 *
 * docs/fake-nvml.md documents the language; a test compares it with the tables here.
 */
#include "tokens.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool call(struct line_tokens *w, const char *token, enum fake_call *out)
{
    for (*out = 0; *out <= CALL_ALL; (*out)++)
        if (token_is(token, fake_call_name(*out)))
            return true;
    return token_wrong(w, "no such call", token);
}

static bool gpus(struct line_tokens *w, const char *token, uint32_t *out)
{
    return token_small(w, "gpus", token, FAKE_GPUS, out) &&
           (*out > 0 || token_wrong(w, "gpus is a number from 1 to 40, not", token));
}

static bool gpu(struct line_tokens *w, uint32_t *out)
{
    return token_small(w, "the GPU", token_next(w), fake.gpus - 1, out);
}

/* Parse gi=1 ci=0 in any order, and data=N if @data is not NULL. */
static bool parse_instance(struct line_tokens *w, struct fake_command *c, uint64_t *data)
{
    for (const char *token = token_next(w); token; token = token_next(w)) {
        const char *gi = token_value(token, "gi"), *ci = token_value(token, "ci");
        const char *more = token_value(token, "data");

        if (!gi && !ci && !(data && more))
            return token_wrong(w, "not expected here", token);
        if ((gi && !token_small(w, "gi", gi, UINT32_MAX, &c->gi)) ||
            (ci && !token_small(w, "ci", ci, UINT32_MAX, &c->ci)) ||
            (data && more && !token_number(w, "data", more, INT64_MAX, data)))
            return false;
    }
    return true;
}

static bool xid(struct line_tokens *w, struct fake_command *c)
{
    c->type = nvmlEventTypeXidCriticalError;
    return token_number(w, "an XID", token_next(w), UINT32_MAX, &c->data) && parse_instance(w, c, NULL);
}

static bool event(struct line_tokens *w, struct fake_command *c)
{
    return token_number(w, "an event type", token_next(w), 0xffff, &c->type) && parse_instance(w, c, &c->data);
}

static bool quantity(const char *name, const struct fake_trait *traits, int num, uint8_t *out)
{
    for (int q = 0; q < num; q++)
        if (token_is(name, traits[q].name)) {
            *out = (uint8_t)q;
            return true;
        }
    return false;
}

/* Parse name=5, name=-5, name=+5 (adds), name=none (not supported). */
static bool change(struct line_tokens *w, char *token, struct fake_change *out)
{
    char *value = strchr(token, '='), *name = token;
    unsigned long link;

    if (!value)
        return token_wrong(w, "expected name=value", token);
    *value++ = '\0';
    *out = (struct fake_change){ .relative = *value == '+', .value = FAKE_NONE };
    if (strcmp(value, "none") != 0 && !token_integer(value, &out->value))
        return token_wrong(w, "a value is 5, -5, +5 (more) or none", value);
    if (strncmp(token, "nvlink.", 7) != 0)
        return quantity(token, fake_traits, Q_NUM, &out->quantity) || token_wrong(w, "no such quantity", token);
    link = strtoul(token + 7, &name, 10);
    if (name == token + 7 || *name != '.' || !quantity(name + 1, fake_link_traits, L_NUM, &out->quantity))
        return token_wrong(w, "no such quantity", token);
    if (link >= fake.profile->links)
        return token_wrong(w, "the GPU has no such link", token);
    out->link = (uint8_t)(link + 1);
    return true;
}

static bool set(struct line_tokens *w, struct fake_command *c)
{
    char *token = token_next(w);

    if (!token)
        return token_wrong(w, "expected name=value", token);
    for (; token; token = token_next(w)) {
        if (c->num == sizeof(c->change) / sizeof(c->change[0]))
            return token_wrong(w, "too many values in one line", token);
        if (!change(w, token, &c->change[c->num++]))
            return false;
    }
    return true;
}

/* Parse off, on, or instances that fit into seven compute and eight memory slices. */
static bool mig(struct line_tokens *w, struct fake_command *c)
{
    const struct fake_mig_profile *p = fake.profile->mig;
    uint32_t compute = 0, memory = 0;
    char *token = token_next(w);

    if (!p->name)
        return token_wrong(w, "this profile has no MIG", fake.profile->name);
    c->flag = !token_is(token, "off");
    if (token_is(token, "off") || token_is(token, "on"))
        return true;
    for (; token; token = token_next(w)) {
        for (p = fake.profile->mig; p->name && !token_is(token, p->name); p++)
            ;
        if (!p->name)
            return token_wrong(w, "this profile has no such MIG instance", token);
        compute += p->compute;
        memory += p->memory;
        if (compute > 7 || memory > 8)
            return token_wrong(w, "no room: 7 compute and 8 memory slices", token);
        c->mig[c->num++] = p;
    }
    return c->num > 0 || token_wrong(w, "expected off, on or MIG instances", token);
}

static bool hang(struct line_tokens *w, struct fake_command *c)
{
    if (!call(w, token_next(w), &c->call))
        return false;
    for (char *token = token_next(w); token; token = token_next(w))
        if (token_is(token, "lock"))
            c->flag = true;
        else if (!token_duration(w, token, &c->duration_ns))
            return false;
    return true;
}

static bool nvlink(struct line_tokens *w, uint32_t *out)
{
    const char *token = token_next(w);

    return token_small(w, "a link", token, FAKE_LINKS - 1, out) &&
           (*out < fake.profile->links || token_wrong(w, "the GPU has no such link", token));
}

static bool fail(struct line_tokens *w, struct fake_command *c)
{
    char *token = token_next(w);

    if (token_is(token, "field")) {
        c->verb = FAKE_FAIL_FIELD;
        if (!token_small(w, "a field", token_next(w), FAKE_FIELDS - 1, &c->num))
            return false;
    } else if (token_is(token, "link")) {
        c->verb = FAKE_FAIL_LINK;
        if (!nvlink(w, &c->num))
            return false;
    } else if (!call(w, token, &c->call)) {
        return false;
    }
    return token_small(w, "an answer", token_next(w), 999, &c->code);
}

static bool calls(struct line_tokens *w, struct fake_command *c)
{
    return call(w, token_next(w), &c->call) &&
           (c->call != CALL_ALL || token_wrong(w, "one call is counted", "all"));
}

static bool slow(struct line_tokens *w, struct fake_command *c)
{
    return token_duration(w, token_next(w), &c->duration_ns);
}

static const struct {
    const char *token;
    enum fake_verb verb;
    bool (*remainder)(struct line_tokens *w, struct fake_command *c);
} of_gpu[] = {
    { "xid", FAKE_EVENT, xid },         { "event", FAKE_EVENT, event },  { "set", FAKE_SET, set },
    { "lost", FAKE_LOST, NULL },        { "back", FAKE_BACK, NULL },     { "reset", FAKE_RESET, NULL },
    { "replace", FAKE_REPLACE, NULL },  { "mig", FAKE_MIG, mig },        { "hang", FAKE_HANG, hang },
    { "release", FAKE_RELEASE, NULL },  { "slow", FAKE_SLOW, slow },     { "fail", FAKE_FAIL, fail },
    { "nameless", FAKE_NAMELESS, NULL }, { "calls", FAKE_CALLS, calls },
    { "hung", FAKE_HUNG, NULL },
};

static bool gpu_command(struct line_tokens *w, struct fake_command *c)
{
    char *token;

    if (!gpu(w, &c->gpu))
        return false;
    token = token_next(w);
    for (size_t i = 0; i < sizeof(of_gpu) / sizeof(of_gpu[0]); i++)
        if (token_is(token, of_gpu[i].token)) {
            c->verb = of_gpu[i].verb;
            return !of_gpu[i].remainder || of_gpu[i].remainder(w, c);
        }
    return token_wrong(w, "a GPU has no such command", token);
}

static bool storm(struct line_tokens *w, struct fake_command *c)
{
    const char *token = token_next(w), *value;

    c->type = nvmlEventTypeXidCriticalError;
    if (!token_is(token, "gpu"))
        return token_wrong(w, "expected gpu", token);
    if (!gpu(w, &c->gpu))
        return false;
    token = token_next(w);
    if (!token_is(token, "xid"))
        return token_wrong(w, "expected xid", token);
    if (!token_number(w, "an XID", token_next(w), UINT32_MAX, &c->data))
        return false;
    token = token_next(w);
    value = token_value(token, "rate");
    if (!value)
        return token_wrong(w, "expected rate=", token);
    if (!token_small(w, "rate", value, 1000000, &c->rate))
        return false;
    if (c->rate == 0)
        return token_wrong(w, "a storm's rate is at least 1 per second, not", value);
    token = token_next(w);
    value = token_value(token, "for");
    return (value || token_wrong(w, "expected for=", token)) && token_duration(w, value, &c->duration_ns);
}

static bool init(struct line_tokens *w, struct fake_command *c)
{
    char *token = token_next(w);

    if (!token_is(token, "hang"))
        return token_small(w, "an answer", token, 999, &c->code);
    c->verb = FAKE_INIT_HANG;
    return token_duration(w, token_next(w), &c->duration_ns);
}

static bool reload(struct line_tokens *w, struct fake_command *c)
{
    for (const char *token = token_next(w); token; token = token_next(w)) {
        const char *driver = token_value(token, "driver"), *num = token_value(token, "gpus");

        c->flag |= token_is(token, "same_handles");
        if (token_is(token, "same_handles"))
            continue;
        if (!driver && !num)
            return token_wrong(w, "expected driver=, gpus= or same_handles", token);
        if (driver && (!*driver || strlen(driver) >= sizeof(fake.driver)))
            return token_wrong(w, "a driver's version has 1 to 31 characters", token);
        if (driver)
            memcpy(c->text, driver, strlen(driver) + 1);
        else if (!gpus(w, num, &c->num))
            return false;
    }
    return true;
}

static bool count(struct line_tokens *w, struct fake_command *c)
{
    const char *token;

    if (!token_small(w, "an answer", token_next(w), 999, &c->code))
        return false;
    token = token_next(w);
    c->flag = token_is(token, "once");
    return !token || c->flag || token_wrong(w, "expected once", token);
}

static bool listed(struct line_tokens *w, struct fake_command *c)
{
    return token_small(w, "the number of listed GPUs", token_next(w), FAKE_GPUS, &c->num);
}

static bool endless(struct line_tokens *w, struct fake_command *c)
{
    const char *token = token_next(w);

    c->flag = token_is(token, "on");
    return c->flag || token_is(token, "off") || token_wrong(w, "expected on or off", token);
}

/* Parse segv, bus, abort or exit CODE. */
static bool crash(struct line_tokens *w, struct fake_command *c)
{
    static const struct { const char *token; uint32_t number; } signals[] = {
        { "segv", SIGSEGV }, { "bus", SIGBUS }, { "abort", SIGABRT },
    };
    const char *token = token_next(w);

    c->flag = token_is(token, "exit");
    if (c->flag)
        return token_small(w, "an exit code", token_next(w), 255, &c->num);
    for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++)
        if (token_is(token, signals[i].token))
            c->num = signals[i].number;
    return c->num > 0 || token_wrong(w, "expected segv, bus, abort or exit", token);
}

static bool leak(struct line_tokens *w, struct fake_command *c)
{
    return token_small(w, "the MiB of a leak", token_next(w), 65536, &c->num);
}

static bool wait_(struct line_tokens *w, struct fake_command *c)
{
    const char *token = token_next(w);

    c->flag = token_is(token, "empty");
    return c->flag || token_small(w, "an answer", token, 999, &c->code);
}

static bool profile(struct line_tokens *w, struct fake_command *c)
{
    const char *token = token_next(w), *value;

    c->num = 1;
    c->profile = token ? fake_profile_find(token) : NULL;
    if (!c->profile)
        return token_wrong(w, "no such profile", token);
    token = token_next(w);
    value = token_value(token, "gpus");
    if (token && !value)
        return token_wrong(w, "expected gpus=", token);
    return !token || gpus(w, value, &c->num);
}

static bool socket_(struct line_tokens *w, struct fake_command *c)
{
    const char *path = token_next(w);

    if (!path)
        return token_wrong(w, "expected a path", path);
    if (strlen(path) >= sizeof(c->text)) {
        snprintf(w->error, FAKE_ERROR, "the socket's path is %zu bytes, limit %zu", strlen(path),
                 sizeof(c->text) - 1);
        return false;
    }
    memcpy(c->text, path, strlen(path) + 1);
    return true;
}

static const struct {
    const char *token;
    enum fake_verb verb;
    bool (*remainder)(struct line_tokens *w, struct fake_command *c);
} verbs[] = {
    { "gpu", FAKE_NOTHING, gpu_command }, { "storm", FAKE_STORM, storm }, { "init", FAKE_INIT, init },
    { "reload", FAKE_RELOAD, reload },    { "wait", FAKE_WAIT, wait_ },   { "count", FAKE_COUNT, count },
    { "profile", FAKE_PROFILE, profile }, { "socket", FAKE_SOCKET, socket_ },
    { "listed", FAKE_LISTED, listed },    { "endless", FAKE_ENDLESS, endless },
    { "crash", FAKE_CRASH, crash },       { "leak", FAKE_LEAK, leak },
};

bool fake_command_parse(char *line, struct fake_command *c, char error[FAKE_ERROR])
{
    struct line_tokens w = { .error = error };
    char *remainder, *token;

    *c = (struct fake_command){ .gi = FAKE_WHOLE_GPU, .ci = FAKE_WHOLE_GPU };
    line[strcspn(line, "#\r\n")] = '\0';
    for (token = strtok_r(line, " \t", &remainder); token; token = strtok_r(NULL, " \t", &remainder)) {
        if (w.num == TOKENS)
            return token_wrong(&w, "too many words in one line", token);
        w.token[w.num++] = token;
    }
    token = token_next(&w);
    if (!token)
        return true;
    c->timed = token_is(token, "at");
    if (c->timed) {
        if (!token_duration(&w, token_next(&w), &c->at_ns))
            return false;
        token = token_next(&w);
    }
    for (size_t i = 0; i < sizeof(verbs) / sizeof(verbs[0]); i++)
        if (token_is(token, verbs[i].token)) {
            c->verb = verbs[i].verb;
            return verbs[i].remainder(&w, c) &&
                   (w.next == w.num || token_wrong(&w, "not expected here", w.token[w.next]));
        }
    return token_wrong(&w, "no such command", token);
}
