/* sanitized.h - is this test built with a sanitizer? */
#ifndef QE_TESTS_SANITIZED_H
#define QE_TESTS_SANITIZED_H

#ifndef __has_feature
#define __has_feature(what) 0 /* gcc before 14 */
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || __has_feature(address_sanitizer) || \
    __has_feature(thread_sanitizer)
#define SANITIZED 1 /* slow, and with an allocator of its own */
#else
#define SANITIZED 0
#endif

#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
#define FINDS_RACES 1
#else
#define FINDS_RACES 0
#endif

#endif
