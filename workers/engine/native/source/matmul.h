/* A packed matrix, and what the two kinds of tiles (matmul_bf16.h, matmul_words.h) have in common. matmul.c says how it
   is multiplied with. */
#ifndef MATMUL_H
#define MATMUL_H

#include <stddef.h>
#include <stdint.h>

enum { PANEL = 32, HALF = PANEL / 2 }; /* rows of w, columns of y */

/* What weights are stored as, by the numbers that Python names them with. It holds each of them exactly, but for int8,
   which has a scale for each row of w. */
enum { STORED_BF16, STORED_F16, STORED_F32, STORED_INT8 };

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
    case STORED_INT8:                               \
        function(STORED_INT8, __VA_ARGS__);         \
        break;                                      \
    }

struct packed_matrix {
    /* [ceil(n / 32)][k][32] or, of bf16 and int8, [ceil(n / 32)][k / 2][32][2]; k as in `padded` */
    const void *panels;
    /* Both [ceil(n / 32)][32] in the order of the panels' rows, padded as they are. */
    const float *scales; /* of int8 only */
    const float *bias;   /* NULL for none */
    ptrdiff_t n, k;      /* k is even */
    int stored;          /* where x is in bf16: STORED_BF16 or STORED_INT8 */
    int activation;      /* one of activation.h's */
    int gated;           /* y [m, n / 2] */
    int floats;          /* x and y in float, else both in bf16 */
    int to_float;        /* y in float instead of bf16 */
};

/* Bytes of a weight. */
static inline ptrdiff_t stored_size(int stored) {
    return stored == STORED_F32 ? 4 : stored == STORED_INT8 ? 1 : 2;
}

/* Numbers of a panel along k, the last of which may be zeros. */
static inline ptrdiff_t padded(ptrdiff_t k, int stored) {
    return stored == STORED_INT8 ? (k + 3) / 4 * 4 : k;
}

static inline ptrdiff_t panel_bytes(const struct packed_matrix *matrix) {
    return PANEL * padded(matrix->k, matrix->stored) * stored_size(matrix->stored);
}

#endif
