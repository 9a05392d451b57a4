/* A tile of a product with a packed matrix in bf16 (matmul.c): up to 12 rows of x with one panel, whose sums stay in
   registers, and what is left to do with them. For AVX512-BF16. */
#ifndef MATMUL_BF16_H
#define MATMUL_BF16_H

#include "activation.h"
#include "matmul_gather.h"

enum { CHUNK = 32 }; /* elements of k: a line of the cache in a row of x, PANEL of them in a panel */

#ifdef __AVX512BF16__

/* x [rows][k], or gathered in pairs (matmul_gather.h). To sums [rows][32]. */
ALWAYS_INLINE void multiply(int rows, int gathered, const bf16 *x, ptrdiff_t k, const bf16 *panel, prefetching next,
                            float *sums) {
    __m512 sum[MOST_ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (ptrdiff_t j = 0; j < k;) {
        for (int line = 0; line < next.lines; line++, next.at += 64)
            _mm_prefetch(next.at, _MM_HINT_T1);
        for (ptrdiff_t end = j + CHUNK < k ? j + CHUNK : k; j < end; j += 2, panel += 2 * PANEL) {
            __m512bh low = (__m512bh)_mm512_loadu_si512(panel), high = (__m512bh)_mm512_loadu_si512(panel + PANEL);
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                int pair;
                memcpy(&pair, gathered ? x + j * rows + 2 * i : x + i * k + j, sizeof pair);
                __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
                sum[i][0] = _mm512_dpbf16_ps(sum[i][0], both, low);
                sum[i][1] = _mm512_dpbf16_ps(sum[i][1], both, high);
            }
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        _mm512_store_ps(sums + i * PANEL, sum[i][0]);
        _mm512_store_ps(sums + i * PANEL + HALF, sum[i][1]);
    }
}

#define MULTIPLY(rows)                                                                                                 \
    __attribute__((noinline)) static void multiply_##rows(                                                             \
        int gathered, const bf16 *x, ptrdiff_t k, const bf16 *panel, prefetching next, float *sums                     \
    ) {                                                                                                                \
        if (gathered)                                                                                                  \
            multiply(rows, 1, x, k, panel, next, sums);                                                                \
        else                                                                                                           \
            multiply(rows, 0, x, k, panel, next, sums);                                                                \
    }
MULTIPLY(1)
MULTIPLY(2)
MULTIPLY(3)
MULTIPLY(4)
MULTIPLY(5)
MULTIPLY(6)
MULTIPLY(7)
MULTIPLY(8)
MULTIPLY(9)
MULTIPLY(10)
MULTIPLY(11)
MULTIPLY(12)

static void (*const multiply_rows[MOST_ROWS])(int, const bf16 *, ptrdiff_t, const bf16 *, prefetching, float *) = {
    multiply_1, multiply_2, multiply_3, multiply_4,  multiply_5,  multiply_6,
    multiply_7, multiply_8, multiply_9, multiply_10, multiply_11, multiply_12,
};

/* bias [32], or NULL. To y, whose rows are `width` apart, the first `filled` columns; a gated panel has 16. */
ALWAYS_INLINE void finish_tile(
    int activation, int gated, int to_float, const float *bias, int rows, const float *sums, void *y, ptrdiff_t width,
    int filled
) {
    __m512 low_bias = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps(),
        high_bias = bias ? _mm512_loadu_ps(bias + HALF) : low_bias;
    __mmask32 kept = (__mmask32)((1ull << filled) - 1);
    for (int i = 0; i < rows; i++, sums += PANEL) {
        float *floats = (float *)y + i * width;
        bf16 *rounded = (bf16 *)y + i * width;
        __m512 low = (__m512)activated(activation, (lanes)_mm512_add_ps(_mm512_load_ps(sums), low_bias));
        __m512 high = _mm512_add_ps(_mm512_load_ps(sums + HALF), high_bias);
        if (gated)
            low = _mm512_mul_ps(low, high);
        else
            high = (__m512)activated(activation, (lanes)high);
        if (to_float) {
            _mm512_mask_storeu_ps(floats, (__mmask16)kept, low);
            if (!gated)
                _mm512_mask_storeu_ps(floats + HALF, (__mmask16)(kept >> HALF), high);
        } else if (gated) {
            _mm256_mask_storeu_epi16(rounded, (__mmask16)kept, (__m256i)_mm512_cvtneps_pbh(low));
        } else {
            _mm512_mask_storeu_epi16(rounded, kept, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
}

/* What is left to do with a tile's sums [rows][32]. */
static void finish(
    int activation, int gated, int to_float, const float *bias, int rows, const float *sums, void *y, ptrdiff_t width,
    int filled
) {
    WITH_ACTIVATION(finish_tile, activation, gated, to_float, bias, rows, sums, y, width, filled)
}

#endif
#endif
