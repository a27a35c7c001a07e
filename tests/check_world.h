/* check_world.h - a session whose devices are looked at by the check backend, and an inner backend with a planted
 * fault: the first op of one kind and layer does something besides what it should. */
#ifndef QE_TESTS_CHECK_WORLD_H
#define QE_TESTS_CHECK_WORLD_H

#include "step_world.h"

#include "qeffect/check.h"

enum { CHECK_DEVICES_MAX = 8 };

/* The devices of a team, in the order in which they were opened, and what they wrap. */
typedef struct check_devices {
    const qe_backend *inner; /* NULL: host */
    qe_device *device[CHECK_DEVICES_MAX];
    int count;
} check_devices;

static inline void check_opened(qe_device *device, const void *context) {
    check_devices *devices = (check_devices *)(uintptr_t)context;
    qe_device *inner = NULL;
    qe_error error = {0};
    assert_true(devices->count < CHECK_DEVICES_MAX);
    devices->device[devices->count++] = device;
    must(qe_check_wrap(device, devices->inner != NULL ? devices->inner : qe_host_backend(), &inner, &error), &error,
         "wrap");
    qe_host_set_comm(inner, qe_local_comm());
}

static inline world_options checked(world_options options, check_devices *devices) {
    options.backend = qe_check_backend();
    options.opened = check_opened;
    options.opened_context = devices;
    return options;
}

static inline qe_check_count check_total(const check_devices *devices) {
    qe_check_count total = {0};
    for (int i = 0; i < devices->count; i++) {
        qe_check_count one = qe_check_counts(devices->device[i]);
        total.ops += one.ops;
        total.graphs += one.graphs;
        total.transfers += one.transfers;
        total.launches += one.launches;
    }
    return total;
}

/* How many ops of a rank's training program are transfers, and how many are not. */
static inline void check_planned(const world *w, uint64_t *ops_out, uint64_t *transfers_out) {
    *ops_out = *transfers_out = 0;
    for (uint32_t rank = 0; rank < w->plan->ranks; rank++) {
        const qe_program *program = &w->plan->rank[rank].program;
        for (uint32_t i = 0; i < program->item_count; i++) {
            if (program->items[i].kind != QE_ITEM_OP) continue;
            const char *label = program->labels[program->items[i].label].text;
            int transfer = strcmp(label, "send") == 0 || strcmp(label, "recv") == 0;
            *(transfer ? transfers_out : ops_out) += 1;
        }
    }
}

#endif
