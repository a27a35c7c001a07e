/* assert.h - for what only our own code can break. Always on in control paths; QE_DASSERT only in debug builds,
 * but its expression is compiled everywhere. One condition each. Never for a caller's input. */
#ifndef QE_BASE_ASSERT_H
#define QE_BASE_ASSERT_H

_Noreturn void qe_assert_failed(const char *expression, const char *file, int line);

#define QE_ASSERT(condition) ((condition) ? (void)0 : qe_assert_failed(#condition, __FILE__, __LINE__))
#ifdef QE_DEBUG
#define QE_DASSERT(condition) QE_ASSERT(condition)
#else
#define QE_DASSERT(condition) ((void)sizeof((condition) ? 1 : 0))
#endif
#define QE_STATIC_ASSERT(condition, why) _Static_assert(condition, why)

/* Passes a failed status on. Only in functions that own nothing at that point. */
#define QE_TRY(call)                                  \
    do {                                              \
        qe_status qe_try_status = (call);             \
        if (qe_try_status != QE_OK) return qe_try_status; \
    } while (0)

#endif
