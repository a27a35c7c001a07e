/* te_products.h - what test_te.c does on a GPU: products of the te backend beside the cuda backend's. */
#ifndef QE_TEST_TE_PRODUCTS_H
#define QE_TEST_TE_PRODUCTS_H

#include "qeffect/backend.h"

/* Whole numbers that are small: every order of adding them gives the same bits, so the backends must agree. */
void products_of_whole_numbers_are_the_cuda_backends(qe_device *te, qe_device *cuda);
/* Its heuristic is told how addresses are aligned; a slot lies on another multiple of QE_ALIGN_BYTES than the next. */
void a_product_has_the_same_bits_wherever_it_lies(qe_device *te);
/* Recorded into a graph and launched: what an op at once left. */
void a_captured_product_has_the_bits_of_an_eager_one(qe_device *te);
/* On a thread that never called Transformer Engine, and without taking memory. */
void captured_attention_has_the_bits_of_an_eager_one(qe_device *te);
void a_product_that_no_matrix_unit_computes_is_refused_in_words(qe_device *te);
/* When it is bound, when it runs and when it is recorded; and the device goes on. */
void what_is_thrown_gives_up_the_op_and_not_the_device(qe_device *te);

#endif
