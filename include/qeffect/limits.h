/* limits.h - every bound of the library, with its reason. Actual sizes are measured per plan; these are ceilings. */
#ifndef QEFFECT_LIMITS_H
#define QEFFECT_LIMITS_H

enum {
    QE_STREAMS_MAX = 16,        /* streams of one rank: caller, compute, and a send and a receive per directed edge */
    QE_PROGRAM_STREAMS_MAX = 64, /* streams of one program: a trace may hold several ranks, or a framework's pools */
    QE_EFFECTS_MAX = 16,        /* effects of one op; the widest fused op declares ten */
    QE_RANKS_MAX = 64,          /* ranks that run in one process: each is a handful of threads */
    QE_SCHEDULE_RANKS_MAX = 4096, /* ranks of a schedule that is only written, checked or simulated: one per stage */
    QE_STAGES_MAX = 4096,       /* stages a schedule may have; a stage index is 16 bits in an effect */
    QE_MICROBATCHES_MAX = 65536, /* microbatches of a step in a schedule */
    QE_CHUNKS_MAX = 64,         /* stages on one rank */
    QE_VIOLATIONS_MAX = 16,     /* records kept for one refused call; later ones are counted */
    QE_NAME_BYTES = 96,         /* object and parameter names, terminator included */
    QE_HISTORY_MAX = 65536,     /* amax history length; Transformer Engine's default is 1024 */
    QE_BLOCK = 128,             /* side of a quantization block, as Transformer Engine's Float8BlockScaling */
    QE_MODEL_SIZE_MAX = 1 << 24, /* any one size of a model: keeps products of two within 64 bits by far */
    QE_ALIGN_BYTES = 64,        /* every placement; one cache line, one AVX-512 register */
};

#define QE_NONE UINT32_MAX /* no object, no stream, no microbatch */

#endif
