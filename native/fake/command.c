/*
 * command.c - a line of a scenario, read and checked. Strict: what is not understood is named.
 *
 * docs/fake-nvml.md is the reference of the language, and a test holds it to the tables here.
 */
#include "words.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool call(struct words *w, const char *word, enum fake_call *out)
{
    for (*out = 0; *out <= CALL_ALL; (*out)++)
        if (word_is(word, fake_call_name(*out)))
            return true;
    return word_wrong(w, "no such call", word);
}

static bool gpus(struct words *w, const char *word, uint32_t *out)
{
    return word_small(w, "gpus", word, FAKE_GPUS, out) &&
           (*out > 0 || word_wrong(w, "gpus is a number from 1 to 40, not", word));
}

static bool gpu(struct words *w, uint32_t *out)
{
    return word_small(w, "the GPU", word_next(w), fake.gpus - 1, out);
}

/* gi=1 ci=0 in any order, and data=N if @data is not NULL */
static bool place(struct words *w, struct fake_command *c, uint64_t *data)
{
    for (const char *word = word_next(w); word; word = word_next(w)) {
        const char *gi = word_value(word, "gi"), *ci = word_value(word, "ci");
        const char *more = word_value(word, "data");

        if (!gi && !ci && !(data && more))
            return word_wrong(w, "not expected here", word);
        if ((gi && !word_small(w, "gi", gi, UINT32_MAX, &c->gi)) ||
            (ci && !word_small(w, "ci", ci, UINT32_MAX, &c->ci)) ||
            (data && more && !word_number(w, "data", more, INT64_MAX, data)))
            return false;
    }
    return true;
}

static bool xid(struct words *w, struct fake_command *c)
{
    c->type = nvmlEventTypeXidCriticalError;
    return word_number(w, "an XID", word_next(w), UINT32_MAX, &c->data) && place(w, c, NULL);
}

static bool event(struct words *w, struct fake_command *c)
{
    return word_number(w, "an event type", word_next(w), 0xffff, &c->type) && place(w, c, &c->data);
}

static bool quantity(const char *name, const struct fake_trait *traits, int num, uint8_t *out)
{
    for (int q = 0; q < num; q++)
        if (word_is(name, traits[q].name)) {
            *out = (uint8_t)q;
            return true;
        }
    return false;
}

/* name=5, name=-5, name=+5 (more), name=none (not supported) */
static bool change(struct words *w, char *word, struct fake_change *out)
{
    char *value = strchr(word, '='), *name = word;
    unsigned long link;

    if (!value)
        return word_wrong(w, "expected name=value", word);
    *value++ = '\0';
    *out = (struct fake_change){ .relative = *value == '+', .value = FAKE_NONE };
    if (strcmp(value, "none") != 0 && !word_integer(value, &out->value))
        return word_wrong(w, "a value is 5, -5, +5 (more) or none", value);
    if (strncmp(word, "nvlink.", 7) != 0)
        return quantity(word, fake_traits, Q_NUM, &out->quantity) || word_wrong(w, "no such quantity", word);
    link = strtoul(word + 7, &name, 10);
    if (name == word + 7 || *name != '.' || !quantity(name + 1, fake_link_traits, L_NUM, &out->quantity))
        return word_wrong(w, "no such quantity", word);
    if (link >= fake.profile->links)
        return word_wrong(w, "the GPU has no such link", word);
    out->link = (uint8_t)(link + 1);
    return true;
}

static bool set(struct words *w, struct fake_command *c)
{
    char *word = word_next(w);

    if (!word)
        return word_wrong(w, "expected name=value", word);
    for (; word; word = word_next(w)) {
        if (c->num == sizeof(c->change) / sizeof(c->change[0]))
            return word_wrong(w, "too many values in one line", word);
        if (!change(w, word, &c->change[c->num++]))
            return false;
    }
    return true;
}

/* off, on, or instances that fit into seven compute and eight memory slices */
static bool mig(struct words *w, struct fake_command *c)
{
    const struct fake_mig_profile *p = fake.profile->mig;
    uint32_t compute = 0, memory = 0;
    char *word = word_next(w);

    if (!p->name)
        return word_wrong(w, "this profile has no MIG", fake.profile->name);
    c->flag = !word_is(word, "off");
    if (word_is(word, "off") || word_is(word, "on"))
        return true;
    for (; word; word = word_next(w)) {
        for (p = fake.profile->mig; p->name && !word_is(word, p->name); p++)
            ;
        if (!p->name)
            return word_wrong(w, "this profile has no such MIG instance", word);
        compute += p->compute;
        memory += p->memory;
        if (compute > 7 || memory > 8)
            return word_wrong(w, "no room: 7 compute and 8 memory slices", word);
        c->mig[c->num++] = p;
    }
    return c->num > 0 || word_wrong(w, "expected off, on or MIG instances", word);
}

static bool hang(struct words *w, struct fake_command *c)
{
    if (!call(w, word_next(w), &c->call))
        return false;
    for (char *word = word_next(w); word; word = word_next(w))
        if (word_is(word, "lock"))
            c->flag = true;
        else if (!word_duration(w, word, &c->duration_ns))
            return false;
    return true;
}

static bool link(struct words *w, uint32_t *out)
{
    const char *word = word_next(w);

    return word_small(w, "a link", word, FAKE_LINKS - 1, out) &&
           (*out < fake.profile->links || word_wrong(w, "the GPU has no such link", word));
}

static bool fail(struct words *w, struct fake_command *c)
{
    char *word = word_next(w);

    if (word_is(word, "field")) {
        c->verb = FAKE_FAIL_FIELD;
        if (!word_small(w, "a field", word_next(w), FAKE_FIELDS - 1, &c->num))
            return false;
    } else if (word_is(word, "link")) {
        c->verb = FAKE_FAIL_LINK;
        if (!link(w, &c->num))
            return false;
    } else if (!call(w, word, &c->call)) {
        return false;
    }
    return word_small(w, "an answer", word_next(w), 999, &c->code);
}

static bool calls(struct words *w, struct fake_command *c)
{
    return call(w, word_next(w), &c->call) &&
           (c->call != CALL_ALL || word_wrong(w, "one call is counted", "all"));
}

static bool slow(struct words *w, struct fake_command *c)
{
    return word_duration(w, word_next(w), &c->duration_ns);
}

static const struct {
    const char *word;
    enum fake_verb verb;
    bool (*rest)(struct words *w, struct fake_command *c);
} of_gpu[] = {
    { "xid", FAKE_EVENT, xid },         { "event", FAKE_EVENT, event },  { "set", FAKE_SET, set },
    { "lost", FAKE_LOST, NULL },        { "back", FAKE_BACK, NULL },     { "reset", FAKE_RESET, NULL },
    { "replace", FAKE_REPLACE, NULL },  { "mig", FAKE_MIG, mig },        { "hang", FAKE_HANG, hang },
    { "release", FAKE_RELEASE, NULL },  { "slow", FAKE_SLOW, slow },     { "fail", FAKE_FAIL, fail },
    { "nameless", FAKE_NAMELESS, NULL }, { "calls", FAKE_CALLS, calls },
    { "hung", FAKE_HUNG, NULL },
};

static bool gpu_command(struct words *w, struct fake_command *c)
{
    char *word;

    if (!gpu(w, &c->gpu))
        return false;
    word = word_next(w);
    for (size_t i = 0; i < sizeof(of_gpu) / sizeof(of_gpu[0]); i++)
        if (word_is(word, of_gpu[i].word)) {
            c->verb = of_gpu[i].verb;
            return !of_gpu[i].rest || of_gpu[i].rest(w, c);
        }
    return word_wrong(w, "a GPU has no such command", word);
}

static bool storm(struct words *w, struct fake_command *c)
{
    const char *word = word_next(w), *value;

    c->type = nvmlEventTypeXidCriticalError;
    if (!word_is(word, "gpu"))
        return word_wrong(w, "expected gpu", word);
    if (!gpu(w, &c->gpu))
        return false;
    word = word_next(w);
    if (!word_is(word, "xid"))
        return word_wrong(w, "expected xid", word);
    if (!word_number(w, "an XID", word_next(w), UINT32_MAX, &c->data))
        return false;
    word = word_next(w);
    value = word_value(word, "rate");
    if (!value)
        return word_wrong(w, "expected rate=", word);
    if (!word_small(w, "rate", value, 1000000, &c->rate))
        return false;
    if (c->rate == 0)
        return word_wrong(w, "a storm's rate is at least 1 per second, not", value);
    word = word_next(w);
    value = word_value(word, "for");
    return (value || word_wrong(w, "expected for=", word)) && word_duration(w, value, &c->duration_ns);
}

static bool init(struct words *w, struct fake_command *c)
{
    char *word = word_next(w);

    if (!word_is(word, "hang"))
        return word_small(w, "an answer", word, 999, &c->code);
    c->verb = FAKE_INIT_HANG;
    return word_duration(w, word_next(w), &c->duration_ns);
}

static bool reload(struct words *w, struct fake_command *c)
{
    for (const char *word = word_next(w); word; word = word_next(w)) {
        const char *driver = word_value(word, "driver"), *num = word_value(word, "gpus");

        c->flag |= word_is(word, "same_handles");
        if (word_is(word, "same_handles"))
            continue;
        if (!driver && !num)
            return word_wrong(w, "expected driver=, gpus= or same_handles", word);
        if (driver && (!*driver || strlen(driver) >= sizeof(fake.driver)))
            return word_wrong(w, "a driver's version has 1 to 31 characters", word);
        if (driver)
            memcpy(c->text, driver, strlen(driver) + 1);
        else if (!gpus(w, num, &c->num))
            return false;
    }
    return true;
}

static bool count(struct words *w, struct fake_command *c)
{
    const char *word;

    if (!word_small(w, "an answer", word_next(w), 999, &c->code))
        return false;
    word = word_next(w);
    c->flag = word_is(word, "once");
    return !word || c->flag || word_wrong(w, "expected once", word);
}

static bool wait_(struct words *w, struct fake_command *c)
{
    const char *word = word_next(w);

    c->flag = word_is(word, "empty");
    return c->flag || word_small(w, "an answer", word, 999, &c->code);
}

static bool profile(struct words *w, struct fake_command *c)
{
    const char *word = word_next(w), *value;

    c->num = 1;
    c->profile = word ? fake_profile_find(word) : NULL;
    if (!c->profile)
        return word_wrong(w, "no such profile", word);
    word = word_next(w);
    value = word_value(word, "gpus");
    if (word && !value)
        return word_wrong(w, "expected gpus=", word);
    return !word || gpus(w, value, &c->num);
}

static bool socket_(struct words *w, struct fake_command *c)
{
    const char *path = word_next(w);

    if (!path)
        return word_wrong(w, "expected a path", path);
    if (strlen(path) >= sizeof(c->text)) {
        snprintf(w->error, FAKE_ERROR, "the socket's path is %zu bytes, limit %zu", strlen(path),
                 sizeof(c->text) - 1);
        return false;
    }
    memcpy(c->text, path, strlen(path) + 1);
    return true;
}

static const struct {
    const char *word;
    enum fake_verb verb;
    bool (*rest)(struct words *w, struct fake_command *c);
} verbs[] = {
    { "gpu", FAKE_NOTHING, gpu_command }, { "storm", FAKE_STORM, storm }, { "init", FAKE_INIT, init },
    { "reload", FAKE_RELOAD, reload },    { "wait", FAKE_WAIT, wait_ },   { "count", FAKE_COUNT, count },
    { "profile", FAKE_PROFILE, profile }, { "socket", FAKE_SOCKET, socket_ },
};

bool fake_command_parse(char *line, struct fake_command *c, char error[FAKE_ERROR])
{
    struct words w = { .error = error };
    char *rest, *word;

    *c = (struct fake_command){ .gi = FAKE_WHOLE_GPU, .ci = FAKE_WHOLE_GPU };
    line[strcspn(line, "#\r\n")] = '\0';
    for (word = strtok_r(line, " \t", &rest); word; word = strtok_r(NULL, " \t", &rest)) {
        if (w.num == WORDS)
            return word_wrong(&w, "too many words in one line", word);
        w.word[w.num++] = word;
    }
    word = word_next(&w);
    if (!word)
        return true;
    c->timed = word_is(word, "at");
    if (c->timed) {
        if (!word_duration(&w, word_next(&w), &c->at_ns))
            return false;
        word = word_next(&w);
    }
    for (size_t i = 0; i < sizeof(verbs) / sizeof(verbs[0]); i++)
        if (word_is(word, verbs[i].word)) {
            c->verb = verbs[i].verb;
            return verbs[i].rest(&w, c) &&
                   (w.next == w.num || word_wrong(&w, "not expected here", w.word[w.next]));
        }
    return word_wrong(&w, "no such command", word);
}
