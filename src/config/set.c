/* set.c - one `group.key=value` from the command line. */
#include <stdio.h>
#include <string.h>

#include "config/table.h"

static qe_status refuse_key(const char *key, size_t length, qe_error *error_out) {
    char shown[QE_SHOWN_BYTES], group[QE_SHOWN_BYTES], remedy[QE_ERROR_TEXT_BYTES];
    qe_settings_show(key, length, shown);
    const char *point = strchr(shown, '.');
    snprintf(group, sizeof group, "%.*s", (int)strcspn(shown, "."), shown);
    if (point != NULL) qe_settings_suggest_key(group, point + 1, remedy, sizeof remedy);
    else qe_settings_suggest_group(group, remedy, sizeof remedy);
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, remedy, "--set: unknown key %s", shown);
}

qe_status qe_settings_set(qe_settings *settings, const char *assignment, qe_error *error_out) {
    const char *equals = strchr(assignment, '=');
    if (equals == NULL || equals == assignment) {
        char shown[QE_SHOWN_BYTES];
        qe_settings_show(assignment, strlen(assignment), shown);
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "Write for example: --set train.steps=100",
                            "--set: found \"%s\", expected group.key=value", shown);
    }
    size_t length = (size_t)(equals - assignment), row = qe_settings_row_find(assignment, length);
    if (row == qe_settings_count()) return refuse_key(assignment, length, error_out);
    const char *value = equals + 1;
    /* The shell has taken the quotes away: what is due as text is text. */
    qe_scalar scalar = {value, strlen(value), qe_settings_row_at(row)->type == QE_ROW_TEXT};
    qe_status status = qe_settings_assign(settings, row, &scalar, QE_ERROR_ARGUMENT, error_out);
    if (status == QE_OK) settings->place[row] = (qe_settings_place){QE_SETTINGS_LINE_COMMAND, 0};
    return status;
}
