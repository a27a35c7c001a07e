/* simulate.h - what a schedule costs: when every action runs, where ranks wait, and what they keep. Times and sizes
 * are in units of the caller's (ms and bytes; or a microbatch of a whole rank as 1, as papers count).
 *
 * An action starts when its rank is free, everything before it in its row is done, and its input has arrived. */
#ifndef QEFFECT_SIMULATE_H
#define QEFFECT_SIMULATE_H

#include "qeffect/schedule.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a (stage, microbatch) keeps, by lifetime: plan.h's slots of the same letters, its Y being W here. */
typedef enum qe_keep {
    QE_KEEP_I, /* F .. I: needed by the input gradient alone */
    QE_KEEP_X, /* F .. W: needed by the weight gradient too */
    QE_KEEP_W, /* I .. W: made for the weight gradient by the input gradient */
    QE_KEEPS
} qe_keep;

/* One stage. */
typedef struct qe_stage_cost {
    double time[QE_ACTION_KINDS]; /* F, I, W, B; a B that does not save anything is I + W */
    double optimizer;             /* the stage's part of the optimizer's step */
    double keep[QE_KEEPS];        /* size of what one microbatch keeps */
    double output, gradient;      /* size of what F sends to the next stage, I or B to the one before */
} qe_stage_cost;

/* When the result of an action that runs as half of a pair (OVERLAP_F_B) is sent. */
typedef enum qe_release {
    QE_RELEASE_PAIR, /* both at the end of the pair, which starts when both inputs are there: DualPipe's own code */
    QE_RELEASE_OP    /* each at its own end; the halves run one behind the other */
} qe_release;

/* What the optimizer of a rank waits for. */
typedef enum qe_optimizer_sync {
    QE_SYNC_ALL, /* all ranks: gradient norm, finite or not, amaxes */
    QE_SYNC_NONE /* its own rank: only then the stage bubble is what a step loses */
} qe_optimizer_sync;

typedef struct qe_simulation_request {
    const qe_schedule *schedule;
    const qe_stage_cost *costs; /* [cost_count] by stage */
    uint32_t cost_count;        /* stages; 1: the same for all */
    double latency;             /* of a transfer to another rank; a transfer within a rank costs nothing */
    double bandwidth;           /* size per time of a direction between two ranks, whose transfers queue; 0: endless */
    double pair;                /* time of a pair / (time of F + time of B); 0 stands for 1: nothing gained */
    double meet;                /* from the last rank's last action to the optimizers, under QE_SYNC_ALL */
    qe_release release;
    int gradient_early;         /* 1: a full B sends its gradient behind its I, as QEffect's plans do; 0: at its end */
    int backward_splits;        /* 1: a full B keeps what its I and its W would, as QEffect's plans do; 0: it needs no W
                                   of its own */
    qe_optimizer_sync sync;
} qe_simulation_request;

typedef struct qe_simulated_rank {
    double begin, end;      /* start of its first action, end of its last */
    double busy;            /* in actions; end - begin - busy is what it waits in between */
    double optimizer_begin, optimizer_end;
    double peak_kept;       /* largest size kept at once */
    uint32_t peak[QE_KEEPS]; /* most (stage, microbatch) pairs that keep each kind */
} qe_simulated_rank;

/* Start from {0}. A later run reuses the memory of an earlier one, so that a search allocates once. */
typedef struct qe_simulation {
    double makespan;        /* end of the last action of all ranks */
    double span;            /* largest end - begin of a rank: the "cost" of the zero-bubble papers */
    double work;            /* largest busy of a rank: no order is shorter */
    double makespan_bubble; /* makespan - work: lost by a step whose optimizer waits for all */
    double stage_bubble;    /* span - work: lost by one whose optimizers do not */
    double step;            /* time from step to step: with optimizers, as `sync` says */
    double peak_kept;       /* of the rank that keeps most */
    int synchronised;       /* optimizers began when all ranks had ended */
    uint32_t ranks_count, actions_count;
    qe_simulated_rank *ranks; /* [ranks_count] */
    double *start, *end;      /* [actions_count] of every action, by its index in the schedule */
    void *memory;             /* owned: everything above and what the run needs */
    size_t memory_bytes;
} qe_simulation;

/* Runs a schedule in thought.
 * Requires:   qe_schedule_check says QE_OK to the schedule (an order that it refuses may still end here).
 * Ensures:    *simulation holds the result until the next run.
 * On failure: QE_ERROR_ARGUMENT: a cost, or size / bandwidth, is negative, not a number or above 1e30 (so that every
 *             figure is finite), cost_count is neither 1 nor the stages, an index of an action is out of range;
 *             QE_CONTRACT: the schedule stops before its end; QE_ERROR_MEMORY.
 *             *simulation holds no result: its counts are 0.
 * Cost:       linear in actions, about 10 ns each. Owns: the caller deinits. Thread: any, one per simulation. */
qe_status qe_simulation_run(const qe_simulation_request *request, qe_simulation *simulation, qe_error *error_out);
/* The same figures for times that were measured: start and end of every action, by its index, from the beginning of the
 * step. Of the request's costs only `keep`, `optimizer` and what follows them matter.
 * On failure: as qe_simulation_run; QE_ERROR_ARGUMENT: a time is negative or above 1e30, or an action ends before it
 *             starts. */
qe_status qe_simulation_record(const qe_simulation_request *request, const double *start, const double *end,
                               qe_simulation *simulation, qe_error *error_out);
/* Deinit of a zeroed simulation is a no-op. */
void qe_simulation_deinit(qe_simulation *simulation);

/* Costs as papers give them: times of a whole rank (F, I, W; B = I + W), spread evenly over `chunks` stages; a
 * microbatch keeps size 1 on a whole rank, `weight_share` of it (their M_W / M_B) until W. */
qe_stage_cost qe_stage_cost_of(double forward, double input, double weight, double weight_share, uint32_t chunks);

#ifdef __cplusplus
}
#endif
#endif
