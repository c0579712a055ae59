/*
 * Tests of reloads: library and driver appear, vanish, and return as other versions; GPUs keep their records.
 */
#include "check.h"
#include "gpu_fixture.h"

static void test_missing_library_is_absent_and_used_when_it_appears(void)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(580, "profile t4 gpus=2");
    char aside[FX_PATH + 8];

    snprintf(aside, sizeof(aside), "%s.aside", g.library);
    fx_must(!rename(g.library, aside), aside);
    gx_watch(&g, &o, NULL, 0);
    EVENTUALLY(gx_head(&g)->state == DH_STATE_ABSENT);
    CHECK_INT(g.head->err, NVML_ERROR_LIBRARY_NOT_FOUND);
    CHECK(strstr(g.head->err_text, g.library) != NULL);
    CHECK_U64(g.head->gpus, 0);
    CHECK_U64(g.head->failures, 0);
    EVENTUALLY(gx_head(&g)->wait_state == DH_STATE_ABSENT);
    EVENTUALLY(gx_head(&g)->passes >= 3);
    fx_must(!rename(aside, g.library), aside);
    gx_ready(&g, 2);
    CHECK_STR(g.head->err_text, "");
    CHECK_INT(g.head->err, 0);
    CHECK_U64(gx_gpu(&g, 0)->links, 0);
    CHECK_INT(gx_value(&g, 0, DH_GPU_LINKS_UP), -1);
    CHECK_INT(gx_value(&g, 0, DH_GPU_RETIRED_DBE), 0);
    gx_stop(&g);
}

static void test_library_without_required_functions_is_named(void)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = { .wake_fd = -1, .control = -1, .library = "libm.so.6" };

    gx_watch(&g, &o, NULL, 0);
    EVENTUALLY(gx_head(&g)->state == DH_STATE_FAILING);
    CHECK_STR(g.head->err_text, "libm.so.6: no function nvmlInit_v2");
    CHECK_INT(g.head->err, NVML_ERROR_LIBRARY_NOT_FOUND);
    gx_stop(&g);
}

static void test_file_that_is_no_library_fails(void)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = { .wake_fd = -1, .control = -1 };

    fx_write("no library\n", "broken.so");
    snprintf(g.library, sizeof(g.library), "%s/broken.so", fx_root);
    gx_watch(&g, &o, NULL, 0);
    EVENTUALLY(gx_head(&g)->state == DH_STATE_FAILING);
    CHECK(strstr(g.head->err_text, "broken.so") != NULL);
    gx_stop(&g);
}

static void test_unloaded_driver_is_retried(void)
{
    struct dh_gpus_options o = gx_options();
    struct gx g = gx_fake(580, "profile h100 gpus=1\ninit 9");

    gx_watch(&g, &o, NULL, 0);
    EVENTUALLY(gx_head(&g)->failures >= 2);
    CHECK_INT(g.head->state, DH_STATE_FAILING);
    CHECK_INT(g.head->err, NVML_ERROR_DRIVER_NOT_LOADED);
    CHECK_U64(g.head->generation, 0);
    gx_command(&g, "init 0");
    gx_ready(&g, 1);
    CHECK_U64(g.head->generation, 1);
    gx_stop(&g);
}

static void test_driver_reload_is_followed(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=3");
    char uuid[48];

    gx_ready(&g, 3);
    memcpy(uuid, gx_gpu(&g, 2)->uuid, sizeof(uuid));
    while (gx_woken(&g))
        ;
    gx_command(&g, "reload driver=575.57.08");
    EVENTUALLY(gx_head(&g)->generation == 2);
    CHECK_STR(g.head->driver, "575.57.08");
    EVENTUALLY(gx_woken(&g));
    for (uint32_t i = 0; i < 3; i++)
        EVENTUALLY(gx_gpu(&g, i)->handles == 2 && gx_gpu(&g, i)->status == 0);
    CHECK_STR(gx_gpu(&g, 2)->uuid, uuid);
    EVENTUALLY(gx_gpu(&g, 0)->event_mask && gx_gpu(&g, 2)->event_mask);
    gx_command(&g, "gpu 2 xid 31");
    EVENTUALLY(gx_gpu(&g, 2)->xids == 1);
    CHECK_U64(gx_head(&g)->gpus, 3);
    gx_stop(&g);
}

/* A failed call opens the library again, and resets nothing; another module or version is a reload. */
static void test_library_opened_again_is_a_reload_only_of_another_driver(void)
{
    struct gx g;

    fx_dir("sys/module/nvidia");
    g = gx_start(580, "profile h100 gpus=1");
    gx_ready(&g, 1);
    CHECK(g.head->module != 0);
    gx_command(&g, "reload");
    EVENTUALLY(gx_gpu(&g, 0)->handles == 2 && gx_gpu(&g, 0)->status == 0);
    EVENTUALLY(gx_head(&g)->passes >= 3);
    CHECK_U64(g.head->generation, 1);
    gx_command(&g, "reload driver=575.57.08");
    EVENTUALLY(gx_head(&g)->generation == 2);
    fx_dir("sys/module/next");
    fx_remove("sys/module/nvidia");
    fx_dir("sys/module/nvidia");
    gx_command(&g, "reload");
    EVENTUALLY(gx_head(&g)->generation == 3);
    gx_stop(&g);
    fx_remove("sys/module");
}

static void test_unloaded_driver_is_reported_by_every_gpu(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2");

    gx_ready(&g, 2);
    gx_command(&g, "init 9");
    gx_command(&g, "reload");
    EVENTUALLY(gx_head(&g)->state == DH_STATE_FAILING);
    CHECK_INT(g.head->err, NVML_ERROR_DRIVER_NOT_LOADED);
    for (uint32_t i = 0; i < 2; i++) {
        uint64_t passes;

        EVENTUALLY(gx_gpu(&g, i)->status == NVML_ERROR_DRIVER_NOT_LOADED);
        CHECK_U64(gx_gpu(&g, i)->valid[0] | gx_gpu(&g, i)->valid[1], 0);
        CHECK(strlen(gx_gpu(&g, i)->uuid) == 40);
        passes = gx_gpu(&g, i)->passes;
        EVENTUALLY(gx_gpu(&g, i)->passes > passes); /* reported, not silent */
    }
    gx_command(&g, "init 0");
    for (uint32_t i = 0; i < 2; i++)
        EVENTUALLY(gx_gpu(&g, i)->status == 0 && gx_gpu(&g, i)->handles == 2);
    EVENTUALLY(gx_head(&g)->generation == 2);
    gx_stop(&g);
}

static void test_removed_gpu_keeps_its_record(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=3");

    gx_ready(&g, 3);
    gx_command(&g, "reload gpus=2");
    EVENTUALLY(gx_gpu(&g, 2)->status == NVML_ERROR_GPU_NOT_FOUND);
    CHECK(strlen(gx_gpu(&g, 2)->uuid) == 40);
    EVENTUALLY(gx_head(&g)->generation == 2); /* a publication of its own, which may come after those of the
                                                 GPUs */
    CHECK_U64(g.head->count, 2);
    CHECK_U64(g.head->gpus, 3);
    EVENTUALLY(gx_gpu(&g, 0)->status == 0 && gx_gpu(&g, 0)->handles == 2);
    gx_command(&g, "reload gpus=4");
    EVENTUALLY(gx_head(&g)->gpus == 4);
    EVENTUALLY(gx_gpu(&g, 3)->status == 0 && gx_gpu(&g, 3)->handles == 1);
    EVENTUALLY(gx_gpu(&g, 2)->status == 0 && gx_gpu(&g, 2)->handles == 2);
    CHECK_U64(gx_head(&g)->count, 4);
    gx_stop(&g);
}

static void test_other_gpu_at_the_same_index_gets_another_record(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2");
    char bus[24];

    gx_ready(&g, 2);
    memcpy(bus, gx_gpu(&g, 1)->bus, sizeof(bus));
    gx_command(&g, "gpu 1 replace");
    gx_command(&g, "reload");
    EVENTUALLY(gx_head(&g)->gpus == 3);
    EVENTUALLY(gx_gpu(&g, 1)->status == NVML_ERROR_GPU_NOT_FOUND);
    EVENTUALLY(gx_gpu(&g, 2)->status == 0 && *gx_gpu(&g, 2)->bus);
    CHECK_STR(gx_gpu(&g, 2)->bus, bus);
    CHECK(strcmp(gx_gpu(&g, 1)->uuid, gx_gpu(&g, 2)->uuid) != 0);
    gx_stop(&g);
}

/* While a thread hangs in a call, the library cannot be closed; when it returns, everything is repeated. */
static void test_reload_during_a_hung_call_is_finished_later(void)
{
    struct gx g = gx_start_short_deadlines(580, "profile h100 gpus=2");

    gx_ready(&g, 2);
    gx_command(&g, "gpu 1 hang nvmlDeviceGetFieldValues");
    gx_await_hang(&g, 1);
    gx_command(&g, "reload");
    EVENTUALLY(gx_gpu(&g, 0)->status != 0); /* its status gives the reason */
    CHECK_INT(gx_gpu(&g, 1)->call, DH_CALL_FIELDS);
    gx_command(&g, "gpu 1 release");
    for (uint32_t i = 0; i < 2; i++)
        EVENTUALLY(gx_gpu(&g, i)->status == 0 && gx_gpu(&g, i)->handles == 2);
    gx_stop(&g);
}

/* After a reload each GPU is identified. One that hangs in that must not hide that the driver is loaded. */
static void test_gpu_hung_in_identification_hides_no_other(void)
{
    struct gx g = gx_start_short_deadlines(580, "profile h100 gpus=2");

    gx_ready(&g, 2);
    gx_command(&g, "init 9");
    gx_command(&g, "reload");
    EVENTUALLY(gx_head(&g)->state == DH_STATE_FAILING);
    gx_command(&g, "gpu 1 hang nvmlDeviceGetUUID");
    gx_command(&g, "init 0");
    EVENTUALLY(gx_command(&g, "gpu 1 hung") == 2); /* its own thread, and the opener that scans for new GPUs */
    EVENTUALLY(gx_is_overdue(&g, &g.w->opener) && gx_is_overdue(&g, gx_caller(&g, 1)));
    CHECK_INT(gx_head(&g)->state, DH_STATE_OK);
    CHECK_INT(g.head->err, 0);
    CHECK_INT(g.head->call, DH_CALL_IDENTITY);
    CHECK_INT(gx_gpu(&g, 1)->call, DH_CALL_IDENTITY);
    EVENTUALLY(gx_gpu(&g, 0)->status == 0);
    CHECK_INT(gx_head(&g)->call, DH_CALL_IDENTITY);
    gx_command(&g, "gpu 1 release");
    EVENTUALLY(gx_gpu(&g, 1)->status == 0);
    gx_stop(&g);
}

static void test_mig_instances_are_followed(void)
{
    struct gx g = gx_start(580, "profile h100 gpus=2");
    uint32_t generation;

    gx_ready(&g, 2);
    CHECK_U64(gx_gpu(&g, 0)->migs, 0);
    gx_command(&g, "gpu 0 mig 3g.40gb 1g.10gb");
    EVENTUALLY(gx_gpu(&g, 0)->migs == 2);
    generation = gx_gpu(&g, 0)->mig_generation;
    CHECK_INT(gx_value(&g, 0, DH_GPU_MIG_MODE), 1);
    CHECK_U64(gx_gpu(&g, 0)->mig[0].gi, 1);
    CHECK_U64(gx_gpu(&g, 0)->mig[1].gi, 7);
    CHECK(!strncmp(gx_gpu(&g, 0)->mig[1].uuid, "MIG-", 4));
    gx_command(&g, "gpu 0 mig 3g.40gb 3g.40gb");
    EVENTUALLY(gx_gpu(&g, 0)->mig_generation > generation);
    CHECK_U64(gx_gpu(&g, 0)->migs, 2);
    CHECK_U64(gx_gpu(&g, 0)->mig[1].gi, 2);
    gx_command(&g, "gpu 0 lost");
    EVENTUALLY(gx_gpu(&g, 0)->status == NVML_ERROR_GPU_IS_LOST);
    CHECK_U64(gx_gpu(&g, 0)->migs, 2); /* the identity is still known */
    gx_command(&g, "gpu 0 back");
    gx_command(&g, "gpu 0 mig off");
    EVENTUALLY(gx_gpu(&g, 0)->migs == 0);
    EVENTUALLY(gx_value(&g, 0, DH_GPU_MIG_MODE) == 0);
    CHECK_U64(gx_gpu(&g, 1)->mig_generation, 0);
    gx_stop(&g);
}

static void test_pcie_errors_are_read_from_sysfs(void)
{
    struct gx g = gx_start(580, "profile t4 gpus=1");
    char bus[24];

    gx_ready(&g, 1);
    CHECK_INT(gx_gpu(&g, 0)->code[DH_GPU_AER_FATAL], ENOENT + 4096);
    memcpy(bus, gx_gpu(&g, 0)->bus, sizeof(bus));
    fx_write("RxErr 0\nBadTLP 4\nTOTAL_ERR_COR 4\n", "sys/bus/pci/devices/%s/aer_dev_correctable", bus);
    fx_write("Undefined 0\nTOTAL_ERR_NONFATAL 0\n", "sys/bus/pci/devices/%s/aer_dev_nonfatal", bus);
    fx_write("nonsense\n", "sys/bus/pci/devices/%s/aer_dev_fatal", bus);
    EVENTUALLY(gx_value(&g, 0, DH_GPU_AER_CORRECTABLE) == 4);
    EVENTUALLY(gx_value(&g, 0, DH_GPU_AER_NONFATAL) == 0);
    EVENTUALLY(gx_gpu(&g, 0)->code[DH_GPU_AER_FATAL] == EPROTO + 4096);
    CHECK_INT(gx_value(&g, 0, DH_GPU_AER_FATAL), -1);
    gx_stop(&g);
}

int main(void)
{
    fx_begin();
    test_missing_library_is_absent_and_used_when_it_appears();
    test_library_without_required_functions_is_named();
    test_file_that_is_no_library_fails();
    test_unloaded_driver_is_retried();
    test_driver_reload_is_followed();
    test_library_opened_again_is_a_reload_only_of_another_driver();
    test_unloaded_driver_is_reported_by_every_gpu();
    test_removed_gpu_keeps_its_record();
    test_other_gpu_at_the_same_index_gets_another_record();
    test_reload_during_a_hung_call_is_finished_later();
    test_gpu_hung_in_identification_hides_no_other();
    test_mig_instances_are_followed();
    test_pcie_errors_are_read_from_sysfs();
    return check_done("test_thread_gpu_reload");
}
