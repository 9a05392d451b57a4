/* What products with weights of 8 or 4 bits do besides (matmul_words.h): rows of x become int16 by a scale of their own.
   A sum of DEPTH words stays below 2**31: 512 * 32767 * 128. */
#ifndef MATMUL_INTEGERS_H
#define MATMUL_INTEGERS_H

#include "lanes.h"
#include "matmul.h"

enum { MAX_INT16 = 32767, PIECE = 256 /* numbers that are converted at once */ };

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

static float quantize_row(const void *x, int floats, ptrdiff_t k, ptrdiff_t end, int16_t *to) {
    return floats ? quantize_numbers(x, 0, k, end, to) : quantize_numbers(x, 1, k, end, to);
}

/* sums [rows][PANEL] times the scales of rows. */
static void scale_sums(float *sums, ptrdiff_t rows, const float *scales) {
    for (ptrdiff_t i = 0; i < rows; i++, sums += PANEL)
        for (ptrdiff_t c = 0; c < PANEL; c += LANES)
            store(sums + c, load(sums + c) * scales[i]);
}

#endif
