/* A packed matrix, and what the two kinds of tiles (matmul_bf16.h, matmul_words.h) have in common. matmul.c says how it
   is multiplied with. */
#ifndef MATMUL_H
#define MATMUL_H

#include <stddef.h>
#include <stdint.h>

enum { PANEL = 32, HALF = PANEL / 2 }; /* rows of w, columns of y */

/* What weights are stored as, by the numbers that Python names them with. Floats hold each of them exactly; integers
   have a scale for each group of a row of w, and those of 4 bits are from 0 to 15 and have a zero point, too. */
enum { STORED_BF16, STORED_F16, STORED_F32, STORED_INT8, STORED_INT4 };

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
    case STORED_INT4:                               \
        function(STORED_INT4, __VA_ARGS__);         \
        break;                                      \
    }

struct packed_matrix {
    /* [ceil(n / 32)][k][32] or, of bf16 and int8, [ceil(n / 32)][k / 2][32][2], of int8 in quads
       [ceil(n / 32)][k / 4][32][4]; k as in `padded`. Of int4 [ceil(n / 32)][k / 8][32] words of 32 bits, whose lower
       halves have the even numbers along k. */
    const void *panels;
    /* These in the order of the panels' rows, padded as they are. */
    const float *scales;  /* of integers [ceil(n / 32)][groups][32] */
    const uint8_t *zeros; /* of int4, likewise */
    const float *bias;    /* [ceil(n / 32)][32]; NULL for none */
    ptrdiff_t n, k;       /* k is even */
    ptrdiff_t group;      /* numbers along k that share a scale: `padded`, or no less than k */
    int stored;           /* where x is in bf16: STORED_BF16 or integers */
    int activation;       /* one of activation.h's */
    int gated;            /* y [m, n / 2] */
    int floats;           /* x and y in float, else both in bf16 */
    int to_float;         /* y in float instead of bf16 */
};

/* Whether integers are multiplied four at a time (matmul_quads.h): those of 8 bits are stored so, and unsigned where the
   instruction takes them so. */
#if (defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)) || \
    (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define MULTIPLIES_QUADS 1
enum { QUAD_OFFSET = 128 };
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define MULTIPLIES_QUADS 1
enum { QUAD_OFFSET = 0 };
#else
#define MULTIPLIES_QUADS 0
enum { QUAD_OFFSET = 0 };
#endif

/* Whether two rows and two columns of quads are multiplied at once. */
#if MULTIPLIES_QUADS && defined(__ARM_FEATURE_MATMUL_INT8)
#define MULTIPLIES_MATRICES 1
#else
#define MULTIPLIES_MATRICES 0
#endif

/* Whether x is multiplied as integers, too. */
static inline int is_integer(int stored) {
    return stored == STORED_INT8 || stored == STORED_INT4;
}

static inline ptrdiff_t stored_bits(int stored) {
    return stored == STORED_F32 ? 32 : stored == STORED_INT8 ? 8 : stored == STORED_INT4 ? 4 : 16;
}

/* Numbers of a panel along k, the last of which may be zeros. */
static inline ptrdiff_t padded(ptrdiff_t k, int stored) {
    ptrdiff_t at_once = stored == STORED_INT4 ? 8 : stored == STORED_INT8 ? 4 : 1;
    return (k + at_once - 1) / at_once * at_once;
}

static inline ptrdiff_t panel_bytes(const struct packed_matrix *matrix) {
    return PANEL * padded(matrix->k, matrix->stored) * stored_bits(matrix->stored) / 8;
}

/* Of one row of w. */
static inline ptrdiff_t count_groups(const struct packed_matrix *matrix) {
    return (matrix->k + matrix->group - 1) / matrix->group;
}

#endif
