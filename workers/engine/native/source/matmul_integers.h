/* Rows of x for products with weights of 8 or 4 bits by words (matmul_words.h), where the processor has no quads
   (matmul_quads.h): they become int16 by a scale of their own. A sum of DEPTH words stays below 2**31:
   512 * 32767 * 128. */
#ifndef MATMUL_INTEGERS_H
#define MATMUL_INTEGERS_H

#include "lanes.h"
#include "matmul.h"
#include "matmul_words.h"

enum { MAX_INT16 = 32767, PIECE = 256 /* numbers that are converted at once */ };

static ptrdiff_t integer_row_bytes(const struct packed_matrix *matrix) {
    return row_words(matrix) * (ptrdiff_t)sizeof(uint32_t);
}

static ptrdiff_t count_scales(const struct packed_matrix *matrix) {
    (void)matrix;
    return 1;
}

/* Sums of a row's numbers. */
static ptrdiff_t count_sums(const struct packed_matrix *matrix, int few) {
    return few && matrix->stored == STORED_INT4
               ? count_blocks(words_of(STORED_INT4, matrix->group), row_words(matrix))
               : 0;
}

/* Numbers of x [k], in float or bf16, from `first` on, with zeros behind the last. Returns how many there are. */
ALWAYS_INLINE ptrdiff_t read_piece(const void *x, int is_bf16, ptrdiff_t first, ptrdiff_t k, float *piece) {
    ptrdiff_t count = k - first < PIECE ? k - first : PIECE, size = is_bf16 ? sizeof(bf16) : sizeof(float);
    widen(piece, (const char *)x + first * size, count, is_bf16);
    memset(piece + count, 0, (size_t)(PIECE - count) * sizeof *piece);
    return count;
}

/* The largest magnitude; NaN where one of them is not finite, which takes compilers that keep x * 0. */
ALWAYS_INLINE float largest_magnitude(const void *x, int is_bf16, ptrdiff_t k) {
    float piece[PIECE];
    lanes most = all(0.0f), check = all(0.0f);
    for (ptrdiff_t first = 0; first < k; first += PIECE) {
        ptrdiff_t count = read_piece(x, is_bf16, first, k, piece);
        for (ptrdiff_t i = 0; i < count; i += LANES) {
            most = larger(most, (lanes)(load_words(piece + i) & 0x7fffffffu));
            check += load(piece + i) * 0.0f;
        }
    }
    return largest(most) + added_up(check);
}

/* x [k] as int16, with zeros up to `end`. Returns the scale that makes them what they were; NaN where one of them is not
   finite, and then numbers are arbitrary. */
ALWAYS_INLINE float quantize_numbers(const void *x, int is_bf16, ptrdiff_t k, ptrdiff_t end, int16_t *to) {
    const float rounding = 12582912.0f; /* 1.5 * 2**23: the sum's last bits are the rounded number */
    float piece[PIECE], most = largest_magnitude(x, is_bf16, k), inverse = most > 1e-30f ? MAX_INT16 / most : 0.0f;
    for (ptrdiff_t first = 0; first < k; first += PIECE) {
        ptrdiff_t count = read_piece(x, is_bf16, first, k, piece);
        for (ptrdiff_t i = 0; i < count; i++)
            to[first + i] = (int16_t)(uint16_t)bits_of_float(piece[i] * inverse + rounding);
    }
    memset(to + k, 0, (size_t)(end - k) * sizeof *to);
    return most / MAX_INT16;
}

/* What the numbers of a row add up to, of each of the blocks that `count_words` makes. */
static void add_up(const int16_t *row, ptrdiff_t group, ptrdiff_t end, int32_t *totals) {
    for (ptrdiff_t first = 0, count; first < end; first += count, totals++) {
        count = count_words(group, first, end);
        *totals = 0;
        for (ptrdiff_t i = 2 * first; i < 2 * (first + count); i++)
            *totals += row[i];
    }
}

/* x [k] as int16, with a scale for all and, where there is room for them, a sum for each block of `count_words`. */
static void quantize_integers(const struct packed_matrix *matrix, const char *x, char *numbers, float *scale,
                              int32_t *totals) {
    ptrdiff_t k = matrix->k, words = row_words(matrix);
    int16_t *to = (int16_t *)(void *)numbers;
    *scale = matrix->floats ? quantize_numbers(x, 0, k, 2 * words, to) : quantize_numbers(x, 1, k, 2 * words, to);
    if (totals)
        add_up(to, words_of(STORED_INT4, matrix->group), words, totals);
}

#endif
