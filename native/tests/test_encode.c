/*
 * test_encode.c - bytes of the health list: some given by hand, the others decoded by a decoder of this test.
 *
 * tests/test_encode.py compares the bytes with Google's and betterproto's encoders.
 */
#include "check.h"

#include <errno.h>

#include "drahealth.h"

#define ROWS(table) (sizeof(table) / sizeof((table)[0]))
#define TEXT_MAX 70000

/* The texts of a device are the beginning of a shared buffer of "a". */
static uint8_t letters[TEXT_MAX];

static struct dh_health device(uint32_t pool, uint32_t name, uint32_t message)
{
    return (struct dh_health){.pool_len = pool, .device_len = name, .message_len = message};
}

static int64_t encode_device(const struct dh_health *h, uint8_t *out, size_t cap)
{
    uint32_t taken = 77;
    int64_t n = dh_health_encode(h, 1, letters, sizeof(letters), out, cap, &taken);

    CHECK_U64(taken, n > 0);
    return n;
}

static void test_bytes_equal_a_message_encoded_by_hand(void)
{
    static const uint8_t text[] = "node-acpu-node0cpu 1 is offline";
    static const struct {
        const char *what;
        struct dh_health h;
        const char *bytes;
        size_t n;
    } rows[] = {
#define BYTES(literal) (literal), sizeof(literal) - 1
        {"all default", {0}, BYTES("\x0a\x02\x0a\x00")},
        {"all set",
         {.pool_off = 0, .pool_len = 6, .device_off = 6, .device_len = 9, .message_off = 15,
          .message_len = 16, .health = 2, .last_updated_s = 1700000000, .timeout_s = 30},
         BYTES("\x0a\x31"
               "\x0a\x13\x0a\x06node-a\x12\x09" "cpu-node0"
               "\x10\x02"
               "\x18\x80\xe2\xcf\xaa\x06"
               "\x20\x1e"
               "\x2a\x10" "cpu 1 is offline")},
        {"pool only", {.pool_len = 4}, BYTES("\x0a\x08\x0a\x06\x0a\x04node")},
        {"device only", {.device_off = 6, .device_len = 3}, BYTES("\x0a\x07\x0a\x05\x12\x03" "cpu")},
        {"the last byte of the text", {.message_off = 30, .message_len = 1},
         BYTES("\x0a\x05\x0a\x00\x2a\x01" "e")},
        {"an empty text at the end", {.pool_off = 31, .device_off = 31, .message_off = 31},
         BYTES("\x0a\x02\x0a\x00")},
        {"negative numbers take ten bytes", {.health = -1, .last_updated_s = -1, .timeout_s = INT64_MIN},
         BYTES("\x0a\x23\x0a\x00"
               "\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"
               "\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"
               "\x20\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01")},
#undef BYTES
    };

    for (size_t i = 0; i < ROWS(rows); i++) {
        uint8_t *exact = check_copy(letters, rows[i].n);
        uint32_t taken = 77;

        check_row = rows[i].what;
        CHECK_INT(dh_health_encode(&rows[i].h, 1, text, sizeof(text) - 1, exact, rows[i].n, &taken),
                  (int64_t)rows[i].n);
        CHECK_U64(taken, 1);
        CHECK(memcmp(exact, rows[i].bytes, rows[i].n) == 0);
        CHECK_INT(dh_health_encode(&rows[i].h, 1, text, sizeof(text) - 1, exact, rows[i].n - 1, &taken),
                  -ENOSPC);
        CHECK_U64(taken, 0);
        free(exact);
    }
    check_row = "";
}

/* A minimal decoder: accepts only fields in order, shortest varints and no default values. */
struct reader {
    const uint8_t *at, *end;
    bool ok;
};

static uint64_t read_varint(struct reader *r)
{
    uint64_t value = 0;

    for (unsigned int shift = 0; r->at < r->end && shift < 70; shift += 7) {
        uint8_t byte = *r->at++;

        value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            r->ok = r->ok && (byte != 0 || shift == 0);
            return value;
        }
    }
    r->ok = false;
    return 0;
}

static bool next_is(struct reader *r, uint8_t tag)
{
    if (r->at == r->end || *r->at != tag)
        return false;
    r->at++;
    return true;
}

static struct reader read_nested(struct reader *r)
{
    uint64_t len = read_varint(r);
    struct reader nested = {r->at, r->at, false};

    if (len > (uint64_t)(r->end - r->at)) {
        r->ok = false;
        return nested;
    }
    r->at += len;
    nested.end = r->at;
    nested.ok = true;
    return nested;
}

static uint64_t read_number(struct reader *r, uint8_t tag)
{
    uint64_t value = 0;

    if (next_is(r, tag)) {
        value = read_varint(r);
        r->ok = r->ok && value != 0;
    }
    return value;
}

static uint32_t read_letters(struct reader *r, uint8_t tag)
{
    struct reader text;

    if (!next_is(r, tag))
        return 0;
    text = read_nested(r);
    r->ok = r->ok && text.ok && text.at < text.end;
    for (const uint8_t *c = text.at; c < text.end; c++)
        r->ok = r->ok && *c == 'a';
    return (uint32_t)(text.end - text.at);
}

static bool read_device(struct reader *list, struct dh_health *h)
{
    struct reader r, id;

    if (!next_is(list, 0x0a))
        return false;
    r = read_nested(list);
    if (!next_is(&r, 0x0a))
        return false;
    id = read_nested(&r);
    *h = device(0, 0, 0);
    h->pool_len = read_letters(&id, 0x0a);
    h->device_len = read_letters(&id, 0x12);
    h->health = (int32_t)read_number(&r, 0x10);
    h->last_updated_s = (int64_t)read_number(&r, 0x18);
    h->timeout_s = (int64_t)read_number(&r, 0x20);
    h->message_len = read_letters(&r, 0x2a);
    return list->ok && r.ok && r.at == r.end && id.ok && id.at == id.end;
}

static bool same(const struct dh_health *a, const struct dh_health *b)
{
    return memcmp(a, b, sizeof(*a)) == 0; /* no padding: tests/test_encode.py relies on it too */
}

static void check_reads_back(const struct dh_health *h)
{
    static uint8_t out[3 * TEXT_MAX + 64];
    struct dh_health back = {0};
    int64_t n = encode_device(h, out, sizeof(out));
    struct reader r = {out, out + (n > 0 ? n : 0), true};

    CHECK(read_device(&r, &back));
    CHECK(r.at == r.end);
    CHECK(same(h, &back));
    if (n > 0) {
        CHECK_INT(encode_device(h, out, (size_t)n), n);
        CHECK_INT(encode_device(h, out, (size_t)n - 1), -ENOSPC);
    }
}

static void test_numbers_of_every_width_decode_to_themselves(void)
{
    for (unsigned int bit = 0; bit < 64; bit++) {
        for (int around = -1; around <= 1; around++) {
            uint64_t value = (UINT64_C(1) << bit) + (uint64_t)(int64_t)around;
            struct dh_health h = device(1, 1, 1);

            h.health = (int32_t)value;
            h.last_updated_s = (int64_t)value;
            h.timeout_s = (int64_t)(0 - value);
            check_reads_back(&h);
        }
    }
}

/* Lengths at which a text, or what surrounds it, needs one more length byte. */
static void test_lengths_of_every_width_decode_to_themselves(void)
{
    static const uint32_t around[] = {0, 1, 100, 127, 128, 16383, 16384, 65535, TEXT_MAX};

    for (size_t i = 0; i < ROWS(around); i++) {
        for (uint32_t less = 0; less < 12 && less <= around[i]; less++) {
            struct dh_health only_pool = device(around[i] - less, 0, 0);
            struct dh_health only_device = device(0, around[i] - less, 0);
            struct dh_health only_message = device(0, 0, around[i] - less);
            struct dh_health all = device(around[i] - less, around[i] - less, around[i] - less);

            check_reads_back(&only_pool);
            check_reads_back(&only_device);
            check_reads_back(&only_message);
            check_reads_back(&all);
        }
    }
}

static void test_record_outside_the_text_is_rejected(void)
{
    static const struct {
        uint32_t off, len;
        int code;
    } rows[] = {
        {0, 10, 0},           {10, 0, 0},          {9, 1, 0},
        {0, 11, -EINVAL},     {10, 1, -EINVAL},    {11, 0, -EINVAL},
        {9, 2, -EINVAL},      {UINT32_MAX, 0, -EINVAL}, {UINT32_MAX, 1, -EINVAL},
        {1, UINT32_MAX, -EINVAL}, {0, UINT32_MAX, -EINVAL}, {UINT32_MAX, UINT32_MAX, -EINVAL},
    };
    uint8_t out[64];

    for (size_t i = 0; i < ROWS(rows); i++) {
        struct dh_health list[3][2] = {{{0}}};

        list[0][1].pool_off = rows[i].off, list[0][1].pool_len = rows[i].len;
        list[1][1].device_off = rows[i].off, list[1][1].device_len = rows[i].len;
        list[2][1].message_off = rows[i].off, list[2][1].message_len = rows[i].len;
        for (size_t field = 0; field < 3; field++) {
            uint32_t taken = 77;
            int64_t n = dh_health_encode(list[field], 2, letters, 10, out, sizeof(out), &taken);

            CHECK_INT(n < 0 ? n : 0, rows[i].code);
            CHECK_U64(taken, n < 0 ? 0 : 2);
        }
    }
}

static void test_no_devices_make_an_empty_message(void)
{
    uint32_t taken = 77;

    CHECK_INT(dh_health_encode(NULL, 0, NULL, 0, NULL, 0, &taken), 0);
    CHECK_U64(taken, 0);
}

static void test_device_without_texts_needs_no_text(void)
{
    const struct dh_health h = device(0, 0, 0);
    uint8_t out[4];
    uint32_t taken = 77;

    CHECK_INT(dh_health_encode(&h, 1, NULL, 0, out, sizeof(out), &taken), 4);
    CHECK_U64(taken, 1);
}

/* For every capacity: whole devices only, no byte behind the end, and continuing gives the same list. */
static void test_list_is_split_between_devices(void)
{
    enum { N = 20, LONGEST = 2 + 2 + 3 + 3 + 2 + N };
    struct dh_health list[N];

    for (uint32_t i = 0; i < N; i++)
        list[i] = device(1, 1, i + 1);
    for (size_t cap = LONGEST; cap < N * LONGEST; cap++) {
        uint32_t done = 0, read = 0;

        while (done < N) {
            uint8_t *out = check_copy(letters, cap);
            uint32_t taken = 0;
            int64_t n = dh_health_encode(list + done, N - done, letters, sizeof(letters), out, cap, &taken);
            struct reader r = {out, out + (n > 0 ? n : 0), true};
            struct dh_health back;

            CHECK(n > 0 && (size_t)n <= cap);
            CHECK(taken > 0 && taken <= N - done);
            for (uint32_t i = 0; i < taken; i++)
                CHECK(read_device(&r, &back) && same(&back, &list[read++]));
            CHECK(r.at == r.end);
            free(out);
            if (taken == 0)
                return;
            done += taken;
        }
        CHECK_U64(read, N);
    }
}

static void test_encode_stops_before_the_first_device_that_does_not_fit(void)
{
    const struct dh_health list[] = {device(1, 1, 1), device(2, 2, TEXT_MAX), device(1, 1, TEXT_MAX + 1)};
    uint8_t out[64];
    uint32_t taken = 77;
    int64_t n = dh_health_encode(list, 3, letters, sizeof(letters), out, sizeof(out), &taken);

    CHECK_U64(taken, 1);
    CHECK_INT(n, 13);
    CHECK_INT(dh_health_encode(list + 1, 2, letters, sizeof(letters), out, sizeof(out), &taken), -ENOSPC);
    CHECK_U64(taken, 0);
    CHECK_INT(dh_health_encode(list + 2, 1, letters, sizeof(letters), out, sizeof(out), &taken), -EINVAL);
    CHECK_INT(dh_health_encode(list, 3, letters, sizeof(letters), NULL, 0, &taken), -ENOSPC);
}

/* Three devices, column by column; the bytes need not be aligned. */
static void test_columns_make_the_records_of_their_devices(void)
{
    static const uint32_t lengths[] = {1, 2, 3, 10, 20, 30, 100, 0, 300};
    static const int32_t health[] = {1, -2, 0};
    static const int64_t numbers[] = {5, INT64_MIN, 7, 30, 0, INT64_MAX};
    uint8_t columns[1 + 3 * 32];
    struct dh_health list[3];

    memcpy(columns + 1, lengths, sizeof(lengths));
    memcpy(columns + 1 + sizeof(lengths), health, sizeof(health));
    memcpy(columns + 1 + sizeof(lengths) + sizeof(health), numbers, sizeof(numbers));
    CHECK_INT(dh_health_fill(list, 3, columns + 1), 0);
    CHECK_U64(list[2].pool_off, 3);
    CHECK_U64(list[2].pool_len, 3);
    CHECK_U64(list[0].device_off, 6);
    CHECK_U64(list[1].device_off, 16);
    CHECK_U64(list[1].device_len, 20);
    CHECK_U64(list[0].message_off, 66);
    CHECK_U64(list[2].message_off, 166);
    CHECK_U64(list[2].message_len, 300);
    CHECK_INT(list[1].health, -2);
    CHECK_INT(list[1].last_updated_s, INT64_MIN);
    CHECK_INT(list[2].timeout_s, INT64_MAX);
}

static void test_columns_with_texts_above_4_gib_are_rejected(void)
{
    static const uint32_t lengths[] = {UINT32_MAX - 1, 1, 0};
    uint8_t columns[32] = {0};
    struct dh_health record;

    memcpy(columns, lengths, sizeof(lengths));
    CHECK_INT(dh_health_fill(&record, 1, columns), 0);
    columns[8] = 1;
    CHECK_INT(dh_health_fill(&record, 1, columns), -EOVERFLOW);
}

int main(void)
{
    memset(letters, 'a', sizeof(letters));
    test_bytes_equal_a_message_encoded_by_hand();
    test_numbers_of_every_width_decode_to_themselves();
    test_lengths_of_every_width_decode_to_themselves();
    test_record_outside_the_text_is_rejected();
    test_no_devices_make_an_empty_message();
    test_device_without_texts_needs_no_text();
    test_list_is_split_between_devices();
    test_encode_stops_before_the_first_device_that_does_not_fit();
    test_columns_make_the_records_of_their_devices();
    test_columns_with_texts_above_4_gib_are_rejected();
    return check_done("test_encode");
}
