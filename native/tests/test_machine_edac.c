/* Tests of memory controllers' counts: which files are read when, and which changes wake the reader. */
#include "check.h"
#include "machine_fixture.h"

#define MC "sys/devices/system/edac/mc"

static void controller_write(uint32_t mc, const char *ce, const char *ue)
{
    fx_write("Skylake Socket#0 IMC#0\n", MC "/mc%u/mc_name", mc);
    fx_write(ce, MC "/mc%u/ce_count", mc);
    fx_write(ue, MC "/mc%u/ue_count", mc);
}

static void module_write(const char *dir, const char *label, const char *ce, const char *ue)
{
    fx_write(label, MC "/%s/dimm_label", dir);
    fx_write("channel 0 slot 1 \n", MC "/%s/dimm_location", dir);
    fx_write(ce, MC "/%s/dimm_ce_count", dir);
    fx_write(ue, MC "/%s/dimm_ue_count", dir);
}

static struct mx opened(void)
{
    const struct dh_machine_options o = mx_options();

    fx_remove("sys");
    fx_dir("sys/devices/system/cpu");
    return mx_open(&o);
}

/* Open a watch with two controllers; the modules of the second are ranks. */
static struct mx machine(void)
{
    struct mx x = opened();

    controller_write(0, "7\n", "0\n");
    module_write("mc0/dimm0", "CPU_SrcID#0_MC#0_Chan#0_DIMM#0\n", "5\n", "0\n");
    module_write("mc0/dimm1", "CPU_SrcID#0_MC#0_Chan#1_DIMM#0\n", "0\n", "0\n");
    controller_write(1, "0\n", "1\n");
    module_write("mc1/rank3", "\n", "0\n", "1\n");
    fx_write("0\n", MC "/mc0/csrow0/ce_count");
    fx_write("0\n", MC "/mc0/dimm/dimm_ce_count");
    fx_dir(MC "/power");
    mx_pass(&x);
    CHECK(mx_woken(&x));
    return x;
}

static void test_counts_of_controllers_and_modules_are_read(void)
{
    struct mx x = machine();

    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->state, DH_STATE_OK);
    CHECK_U64(x.head->dimms, 5);
    CHECK_U64(mx_dimm(&x, 0, DH_CONTROLLER)->ce, 7);
    CHECK_U64(mx_dimm(&x, 0, DH_CONTROLLER)->valid, 3);
    CHECK_STR(mx_dimm(&x, 0, DH_CONTROLLER)->label, "Skylake Socket#0 IMC#0");
    CHECK_STR(mx_dimm(&x, 0, DH_CONTROLLER)->location, "");
    CHECK_U64(mx_dimm(&x, 0, 0)->ce, 5);
    CHECK_STR(mx_dimm(&x, 0, 0)->label, "CPU_SrcID#0_MC#0_Chan#0_DIMM#0");
    CHECK_STR(mx_dimm(&x, 0, 0)->location, "channel 0 slot 1");
    CHECK_STR(mx_dimm(&x, 1, 3)->label, "");
    CHECK_U64(mx_dimm(&x, 1, 3)->ue, 1);
    CHECK_U64(mx_dimm(&x, 1, 3)->valid, 3);
    mx_close(&x);
}

static void test_missing_driver_is_absent_and_no_failure(void)
{
    struct mx x = opened();

    mx_pass(&x);
    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->state, DH_STATE_ABSENT);
    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->err, 0);
    CHECK_U64(mx_source(&x, DH_MACHINE_EDAC)->failures, 0);
    fx_dir(MC "/power"); /* the core of EDAC is loaded, but no driver */
    mx_rescan(&x);
    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->state, DH_STATE_ABSENT);
    CHECK_U64(x.head->dimms, 0);
    mx_close(&x);
}

/* Two files per controller in an unchanged pass, and two per module of a controller that changed. */
static bool rests_until_slow_pass(const struct mx *x)
{
    return x->m->next_ns - x->m->now_ns >= x->m->opt.slow_ns;
}

/* A rescan request ends the rest: the thread waits for it, too. */
static void test_watch_without_controllers_rests_until_the_slow_pass(void)
{
    struct mx x = opened();

    fx_dir("proc");
    mx_pass(&x);
    CHECK(rests_until_slow_pass(&x));
    CHECK_U64(mx_source(&x, DH_MACHINE_EDAC)->period_ns, x.m->opt.slow_ns);
    controller_write(0, "7\n", "0\n");
    mx_rescan(&x);
    CHECK(!rests_until_slow_pass(&x));
    CHECK_U64(mx_source(&x, DH_MACHINE_EDAC)->period_ns, x.m->opt.period_ns);
    mx_close(&x);
    x = opened();
    mx_pass(&x);
    mx_rescan(&x);
    for (int settling = 2; settling; settling--, mx_pass(&x))
        CHECK(!rests_until_slow_pass(&x)); /* passes follow that a recovery needs */
    CHECK(rests_until_slow_pass(&x));
    mx_close(&x);
    fx_remove("proc");
    x = opened();
    mx_pass(&x);
    CHECK(!rests_until_slow_pass(&x)); /* the root is searched for */
    mx_close(&x);
}

static void test_modules_are_read_after_their_controller_changed(void)
{
    struct mx x = machine();
    uint64_t reads = x.head->reads;

    fx_write("6\n", MC "/mc0/dimm0/dimm_ce_count");
    mx_pass(&x);
    CHECK_U64(x.head->reads - reads, 4);
    CHECK_U64(mx_dimm(&x, 0, 0)->ce, 5);
    fx_write("8\n", MC "/mc0/ce_count");
    mx_pass(&x);
    CHECK_U64(x.head->reads - reads, 4 + 4 + 4);
    CHECK_U64(mx_dimm(&x, 0, DH_CONTROLLER)->ce, 8);
    CHECK_U64(mx_dimm(&x, 0, 0)->ce, 6);
    fx_write("2\n", MC "/mc1/rank3/dimm_ce_count");
    mx_later(&x, 60 * DH_NS);
    CHECK_U64(mx_dimm(&x, 1, 3)->ce, 2);
    mx_close(&x);
}

static void test_uncorrectable_error_wakes_at_once_each_time(void)
{
    struct mx x = machine();

    mx_pass(&x);
    CHECK(!mx_woken(&x));
    fx_write("1\n", MC "/mc0/ue_count");
    mx_pass(&x);
    CHECK(mx_woken(&x));
    fx_write("2\n", MC "/mc0/ue_count");
    mx_pass(&x);
    CHECK(mx_woken(&x));
    CHECK_U64(mx_dimm(&x, 0, DH_CONTROLLER)->ue, 2);
    mx_close(&x);
}

/* One wake per slow_ns while the errors go on, and one for the last of them. */
static void test_correctable_error_flood_wakes_rate_limited(void)
{
    struct mx x = machine();
    uint64_t wakes;
    char text[16];

    fx_write("8\n", MC "/mc0/ce_count");
    mx_pass(&x);
    CHECK(mx_woken(&x)); /* the first, at once */
    wakes = x.head->wakes;
    for (int i = 9; i < 29; i++) {
        snprintf(text, sizeof(text), "%d\n", i);
        fx_write(text, MC "/mc0/ce_count");
        mx_later(&x, DH_NS);
        CHECK_U64(mx_dimm(&x, 0, DH_CONTROLLER)->ce, (uint64_t)i);
    }
    CHECK_U64(x.head->wakes - wakes, 2);
    CHECK(mx_woken(&x));
    fx_write("30\n", MC "/mc0/ce_count");
    mx_later(&x, DH_NS);
    CHECK(!mx_woken(&x));
    mx_later(&x, 10 * DH_NS); /* the errors have ended, and the reader does not know yet */
    CHECK(mx_woken(&x));
    mx_later(&x, 10 * DH_NS);
    CHECK(!mx_woken(&x));
    mx_close(&x);
}

/* The kernel module is unloaded and loaded again: the counters restart, which the reader can see. */
static void test_removed_controller_is_unreadable(void)
{
    struct mx x = machine();

    fx_remove(MC "/mc0");
    mx_pass(&x);
    CHECK(mx_woken(&x));
    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->state, DH_STATE_FAILING);
    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->err, ENOENT);
    CHECK_INT(mx_dimm(&x, 0, 0)->err, ENOENT);
    CHECK_U64(mx_dimm(&x, 0, 0)->valid, 0); /* its controller's counts changed: they could not be read */
    CHECK_U64(mx_dimm(&x, 0, 0)->seen, 3);
    CHECK_U64(mx_dimm(&x, 0, 0)->ce, 0);
    CHECK_U64(mx_dimm(&x, 0, DH_CONTROLLER)->valid, 0);
    CHECK_U64(mx_dimm(&x, 1, 3)->valid, 3);
    mx_pass(&x);
    CHECK(!mx_woken(&x)); /* known already */

    controller_write(0, "1\n", "0\n");
    module_write("mc0/dimm0", "moved\n", "1\n", "0\n");
    module_write("mc0/dimm1", "CPU_SrcID#0_MC#0_Chan#1_DIMM#0\n", "0\n", "0\n");
    mx_pass(&x);
    CHECK(mx_woken(&x));
    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->state, DH_STATE_OK);
    CHECK_U64(mx_dimm(&x, 0, 0)->ce, 1);
    CHECK_U64(x.head->dimms, 5);
    mx_rescan(&x);
    CHECK_STR(mx_dimm(&x, 0, 0)->label, "moved");
    CHECK(mx_woken(&x));
    mx_close(&x);
}

static void test_new_controller_is_found_by_a_rescan(void)
{
    struct mx x = machine();

    controller_write(2, "3\n", "0\n");
    module_write("mc2/dimm0", "A1\n", "3\n", "0\n");
    mx_pass(&x);
    CHECK_U64(x.head->dimms, 5);
    mx_rescan(&x);
    CHECK(mx_woken(&x));
    CHECK_U64(x.head->dimms, 7);
    CHECK_U64(mx_dimm(&x, 2, 0)->ce, 3);
    mx_close(&x);
}

static void test_malformed_counts_are_failures(void)
{
    static const char *const texts[] = { "", "\n", "-1\n", "1 2\n", "18446744073709551616\n", "x",
                                         "123456789012345678901234567890123456789\n" };
    struct mx x = machine();

    for (size_t i = 0; i < sizeof(texts) / sizeof(*texts); i++) {
        check_row = texts[i];
        fx_write(texts[i], MC "/mc0/ue_count");
        mx_pass(&x);
        CHECK_U64(mx_dimm(&x, 0, DH_CONTROLLER)->valid, DH_MACHINE_BIT(DH_DIMM_CE));
        CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->state, DH_STATE_FAILING);
        CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->err_field, DH_DIMM_UE);
    }
    check_row = "";
    fx_remove(MC "/mc0/ue_count");
    fx_dir(MC "/mc0/ue_count");
    mx_pass(&x);
    CHECK_INT(mx_dimm(&x, 0, DH_CONTROLLER)->err, EISDIR);
    fx_remove(MC "/mc0/ue_count");
    fx_write("18446744073709551615\n", MC "/mc0/ue_count");
    mx_pass(&x);
    CHECK_U64(mx_dimm(&x, 0, DH_CONTROLLER)->ue, UINT64_MAX);
    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->state, DH_STATE_OK);
    mx_close(&x);
}

static void test_firmware_names_become_printable(void)
{
    struct mx x = opened();
    char text[201];

    memset(text, 'x', 200);
    text[200] = '\0';
    controller_write(0, "0\n", "0\n");
    module_write("mc0/dimm0", "\x01" "A\xff\n\tB  \n", "0\n", "0\n");
    module_write("mc0/dimm1", text, "0\n", "0\n");
    fx_remove(MC "/mc0/dimm1/dimm_location");
    mx_pass(&x);
    CHECK_STR(mx_dimm(&x, 0, 0)->label, "?A???B");
    CHECK_U64(strlen(mx_dimm(&x, 0, 1)->label), DH_LABEL_LEN - 1);
    CHECK_STR(mx_dimm(&x, 0, 1)->location, "");
    mx_close(&x);
}

static void test_directories_without_a_number_are_ignored(void)
{
    static const char *const names[] = { "mc",   "mc01", "mc-1", "mcx", "mc4294967296",
                                         "xmc0", "mc0 ", "mc1x" };
    struct mx x = opened();

    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        fx_write("1\n", MC "/%s/ce_count", names[i]);
    controller_write(0, "0\n", "0\n");
    module_write("mc0/dimm4294967295", "the controller's own number\n", "1\n", "1\n");
    fx_write("a file\n", MC "/mc7");
    mx_pass(&x);
    CHECK_U64(mx_dimm(&x, 0, DH_CONTROLLER)->ce, 0);
    CHECK_U64(x.head->dimms, 2);
    CHECK_U64(mx_dimm(&x, 7, DH_CONTROLLER)->seen, 0);
    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->state, DH_STATE_OK);
    mx_close(&x);
}

static void test_modules_beyond_the_table_fail_the_source(void)
{
    struct mx x = opened();

    controller_write(0, "1\n", "0\n");
    for (uint32_t i = 0; i < 2 * DH_DIMM_MAX; i++)
        fx_dir(MC "/mc0/dimm%u", i);
    mx_pass(&x);
    CHECK_U64(x.head->dimms, DH_DIMM_MAX);
    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->state, DH_STATE_FAILING);
    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->err, DH_EFULL);
    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->err_field, DH_EDAC_LIST);
    CHECK_U64(mx_source(&x, DH_MACHINE_EDAC)->failures, 1);
    fx_remove(MC "/mc0");
    controller_write(0, "2\n", "0\n");
    mx_rescan(&x);
    CHECK_U64(mx_dimm(&x, 0, DH_CONTROLLER)->ce, 2);
    CHECK_INT(mx_source(&x, DH_MACHINE_EDAC)->state, DH_STATE_FAILING); /* modules without room are unknown */
    mx_close(&x);
}

int main(void)
{
    fx_begin();
    fx_dir("sys");
    fx_dir("proc");
    test_counts_of_controllers_and_modules_are_read();
    test_missing_driver_is_absent_and_no_failure();
    test_watch_without_controllers_rests_until_the_slow_pass();
    test_modules_are_read_after_their_controller_changed();
    test_uncorrectable_error_wakes_at_once_each_time();
    test_correctable_error_flood_wakes_rate_limited();
    test_removed_controller_is_unreadable();
    test_new_controller_is_found_by_a_rescan();
    test_malformed_counts_are_failures();
    test_firmware_names_become_printable();
    test_directories_without_a_number_are_ignored();
    test_modules_beyond_the_table_fail_the_source();
    return check_done("test_machine_edac");
}
