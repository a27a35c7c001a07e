/* import.h - a run that begins from the weights of another program, and from its scaling state where that is plain. */
#ifndef QE_CLI_IMPORT_H
#define QE_CLI_IMPORT_H

#include "qeffect/safetensors.h"
#include "qeffect/snapshot.h"

/* What was taken over. */
typedef struct qe_import_report {
    uint32_t scales, scales_found; /* kept by the recipe; of those with state in the file */
    uint32_t pending;              /* amaxes that were recorded and not folded: dropped, as after an evaluation */
    uint32_t pickled;              /* modules whose state is a pickle, which is not read */
} qe_import_report;

/* Fills a snapshot: parameters by their Hugging Face names from F32, BF16 or F16 (exactly), moments 0, scales and
 * histories from Transformer Engine's state of modules that are called as the weights are, else as at a beginning. The
 * newest entries of a history of another length stay.
 * On failure: QE_CONTRACT: *rule_out is checkpoint.missing or checkpoint.shape; QE_ERROR_FORMAT: a module's state. */
qe_status qe_snapshot_import(qe_snapshot *snapshot, const qe_safetensors *file, qe_import_report *report_out,
                             qe_rule *rule_out, qe_error *error_out);

#endif
