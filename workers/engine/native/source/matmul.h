/* A packed matrix, and what the two kinds of tiles (matmul_bf16.h, matmul_float.h) have in common. matmul.c says how it
   is multiplied with. */
#ifndef MATMUL_H
#define MATMUL_H

#include <stddef.h>
#include <stdint.h>

enum { PANEL = 32, HALF = PANEL / 2 }; /* rows of w, columns of y */

/* What weights are stored as, by the numbers that Python names them with. It holds each of them exactly. */
enum { STORED_BF16, STORED_F16, STORED_F32 };

/* Calls `function` with its first argument known to the compiler. */
#define WITH_STORED(function, stored, ...)          \
    switch (stored) {                               \
    case STORED_BF16:                               \
        function(STORED_BF16, __VA_ARGS__);         \
        break;                                      \
    case STORED_F16:                                \
        function(STORED_F16, __VA_ARGS__);          \
        break;                                      \
    case STORED_F32:                                \
        function(STORED_F32, __VA_ARGS__);          \
        break;                                      \
    }

struct packed_matrix {
    /* [ceil(n / 32)][k][32] or, of bf16, [ceil(n / 32)][k / 2][32][2] */
    const void *panels;
    const float *bias; /* [ceil(n / 32)][32] in the order of the panels' rows, padded as they are; NULL for none */
    ptrdiff_t n, k;    /* k is even */
    int stored;     /* STORED_BF16 unless `floats` */
    int activation; /* one of activation.h's */
    int gated;      /* y [m, n / 2] */
    int floats;     /* x and y in float, and so the arithmetic; else both in bf16 */
    int to_float;   /* y in float instead of bf16 */
};

/* Bytes of a weight. */
static inline ptrdiff_t stored_size(int stored) {
    return stored == STORED_F32 ? 4 : 2;
}

#endif
