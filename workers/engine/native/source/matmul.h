/* A packed matrix, and what the two kinds of tiles (matmul_bf16.h, matmul_float.h) have in common. matmul.c says how it
   is multiplied with. */
#ifndef MATMUL_H
#define MATMUL_H

#include <stddef.h>
#include <stdint.h>

enum { PANEL = 32, HALF = PANEL / 2 }; /* rows of w */

/* What weights are stored as, by the numbers that Python names them with. */
enum { STORED_BF16, STORED_F16, STORED_F32 };

struct packed_matrix {
    /* [ceil(n / 32)][k][32] or, of bf16, [ceil(n / 32)][k / 2][32][2] */
    const void *panels;
    const float *bias; /* [ceil(n / 32)][32] in the order of the panels' rows, padded as they are; NULL for none */
    ptrdiff_t n, k;    /* k is even */
    int stored;
    int activation; /* one of activation.h's */
    int gated;      /* y [m, n / 2] */
    int floats;     /* x and y in float, and so the arithmetic; else both in bf16 */
    int to_float;   /* y in float instead of bf16 */
};

/* Bytes of one. */
static inline ptrdiff_t number_size(int stored) {
    return stored == STORED_F32 ? 4 : 2;
}

#endif
