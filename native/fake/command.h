/* command.h - a parsed command, between its line and the GPUs that it changes. */
#ifndef FAKE_COMMAND_H
#define FAKE_COMMAND_H

#include "fake.h"

#define FAKE_ERROR 200 /* room for the error text of a line */

/* A parsed line of a scenario. The verb decides which members are used. */
enum fake_verb {
    FAKE_NOTHING, /* an empty line, or a comment */
    FAKE_PROFILE, FAKE_SOCKET, /* in the file only */
    FAKE_EVENT, FAKE_STORM,
    FAKE_SET, FAKE_LOST, FAKE_BACK, FAKE_RESET, FAKE_REPLACE, FAKE_NAMELESS, FAKE_MIG,
    FAKE_HANG, FAKE_RELEASE, FAKE_SLOW, FAKE_FAIL, FAKE_FAIL_FIELD, FAKE_FAIL_LINK, FAKE_CALLS, FAKE_HUNG,
    FAKE_INIT, FAKE_INIT_HANG, FAKE_COUNT, FAKE_RELOAD, FAKE_WAIT, FAKE_LISTED, FAKE_ENDLESS, FAKE_CRASH, FAKE_LEAK
};

struct fake_change {
    uint8_t link; /* 0: the GPU, else the link's number plus one */
    uint8_t quantity;
    bool relative;
    int64_t value;
};

struct fake_command {
    enum fake_verb verb;
    bool timed;
    uint64_t at_ns;
    uint32_t gpu;
    uint32_t code, gi, ci, rate;
    uint64_t type, data, duration_ns;
    enum fake_call call;
    bool flag; /* by verb: the hang holds the driver's lock; MIG is on; handles stay valid; a wait has no
                  event; once */
    uint32_t num; /* by verb: number of changes, of MIG instances, of GPUs (0: as many as before); a field's
                     id, a link; of listed GPUs; the exit code of a crash, or its signal; MiB of a leak */
    struct fake_change change[16];
    const struct fake_mig_profile *mig[FAKE_MIGS];
    const struct fake_profile *profile;
    char text[108]; /* a socket's path, a driver's version */
};

/* command.c: modifies @line. Return: false, with the reason in @error. Under the lock, as execute. */
bool fake_command_parse(char *line, struct fake_command *c, char error[FAKE_ERROR]);

/* execute.c: the answer is "ok" or "ok 17"; for all verbs but those of the file and of time */
void fake_execute(const struct fake_command *c, char answer[FAKE_ERROR]);

#endif
